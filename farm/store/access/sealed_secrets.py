"""Secrets in the store: keys of engines and secrets of batches, encrypted with the secret key of the farm.

That key is FARM_SECRET_KEY, else the file `secret_key` next to the SQLite file, or in FARM_HOME for another store; the
first process that stores a secret creates it. The store keeps its fingerprint, so that a process with another key fails
at once. A secret may also be `env:NAME`: then the store has only the name, and each node reads its own variable.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, exists, insert, literal, select

from farm.callers import Caller, Scope
from farm.configuration.secret_values import shown_host
from farm.errors import Forbidden, InvalidRequest, NotAllowed, UsageError
from farm.home import own_home, written_once
from farm.store.sql.schema import SecretKeyRow

if TYPE_CHECKING:
    from farm.settings import Settings

FILE = "secret_key"
_SEALED, _REFERENCE = "sealed:", "env:"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_OWN_VARIABLES = "FARM_"
_LEAST_CHARS = 16
_ROLE = "secrets"
_known = SecretKeyRow.__table__


@dataclass(frozen=True, slots=True)
class SecretKey:
    """The secret key of one store in one process: FARM_SECRET_KEY, else the file, which is read at each use.

    `node` names the process in errors. `home` is FARM_HOME, which is created if the file is in it.
    """

    node: str
    file: Path
    home: Path
    given: str = field(default="", repr=False)

    @classmethod
    def of(cls, settings: Settings, url: URL) -> SecretKey:
        """Return the key of the store at a database URL by the settings of a process."""
        home = settings.home.absolute()
        is_file = url.get_backend_name() == "sqlite" and url.database
        folder = Path(str(url.database)).absolute().parent if is_file else home
        return cls(settings.node, folder / FILE, home, settings.secret_key.strip())

    def seal(self, connection: Connection, text: str, caller: Caller | None = None) -> str:
        """Return the stored form of a secret; the first one of a farm creates its key.

        Raises NotAllowed without the farm's secret key; InvalidRequest or Forbidden for a variable that may not be
        named.
        """
        if not text or text == "none":
            return text
        if text.startswith(_REFERENCE):
            return _checked_reference(text, caller)
        return _SEALED + str(_fernet(self._registered(connection)).encrypt(text.encode()).decode())

    def unseal(self, text: str) -> str:
        """Decrypt a stored secret, or return the value of the environment variable that it names.

        Raises NotAllowed, which names the missing key or variable.
        """
        if text.startswith(_REFERENCE):
            name = text.removeprefix(_REFERENCE)
            value = None if name.startswith(_OWN_VARIABLES) else os.environ.get(name)
            if value is None:
                raise NotAllowed(f"node {self.node} has no environment variable {name}, which a secret refers to")
            return value
        if not text.startswith(_SEALED):
            return text
        key = self._required()
        from cryptography.fernet import InvalidToken

        try:
            return str(_fernet(key).decrypt(text.removeprefix(_SEALED)).decode())
        except InvalidToken:
            raise self._differs() from None

    def seal_request(self, connection: Connection, stored: dict[str, Any], caller: Caller | None) -> dict[str, Any]:
        """Return the stored form of a request with its secrets sealed. Raises as `seal`."""
        return _with_secrets(stored, lambda text: self.seal(connection, text, caller))

    def unseal_request(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Return a stored request with its secrets decrypted. Raises as `unseal`."""
        return _with_secrets(stored, self.unseal)

    def check(self, connection: Connection) -> None:
        """Raise NotAllowed if the farm has secrets and this process cannot decrypt them."""
        fingerprint = _fingerprint_in(connection)
        if fingerprint and _fingerprint(self._required()) != fingerprint:
            raise self._differs()

    def fault(self, connection: Connection) -> str:
        """Return the reason this process cannot decrypt the farm's secrets; empty if it can, or there are none."""
        try:
            self.check(connection)
        except UsageError as error:
            return str(error)
        return ""

    def text(self) -> str:
        """Return the key; empty if this process has none. Raises InvalidRequest for one that is too short."""
        text = self.given
        if not text:
            try:
                text = self.file.read_text().strip()
            except OSError:
                return ""
        if len(text) < _LEAST_CHARS:
            raise InvalidRequest(
                f"the secret key must have at least {_LEAST_CHARS} characters", field="FARM_SECRET_KEY"
            )
        return text

    def _required(self) -> str:
        if text := self.text():
            return text
        raise NotAllowed(
            f"node {self.node} has no secret key of the farm, which keys of engines are encrypted with ({self.file}): "
            f"{_REMEDY}"
        )

    def _differs(self) -> NotAllowed:
        return NotAllowed(f"node {self.node} has a different secret key than the farm: {_REMEDY}")

    def _registered(self, connection: Connection) -> str:
        """Return the farm's secret key; create it if there is none. Raises NotAllowed if this process has another."""
        if not _fingerprint_in(connection):
            key = self.text() or self._created()
            unknown = select(literal(_ROLE), literal(_fingerprint(key))).where(~exists().where(_known.c.role == _ROLE))
            connection.execute(insert(_known).from_select(["role", "fingerprint"], unknown))
        self.check(connection)
        return self.text()

    def _created(self) -> str:
        if self.file.parent == self.home:
            own_home(self.home)
        return written_once(self.file, secrets.token_urlsafe(32))


def shown_request(stored: dict[str, Any]) -> dict[str, Any]:
    """Return a stored request for display: without its secrets, sealed or not, and without its webhook's path."""
    shown = _with_secrets(stored, lambda text: "(secret)" if text else "")
    webhook = stored.get("webhook")
    return shown | {"webhook": webhook | {"url": shown_host(webhook["url"])}} if webhook else shown


def _with_secrets(stored: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    def of_engine(engine: dict[str, Any]) -> dict[str, Any]:
        return {**engine, "engine_key": change(engine["engine_key"])} if engine.get("engine_key") else engine

    changed = {**stored, "secrets": {name: change(text) for name, text in stored.get("secrets", {}).items()}}
    if "engines" in stored:
        changed["engines"] = [of_engine(engine) for engine in stored["engines"]]
    if "roles" in stored:
        changed["roles"] = {role: of_engine(engine) for role, engine in stored["roles"].items()}
    return changed


def has_secrets(connection: Connection) -> bool:
    """Return whether the store has any encrypted secret."""
    return bool(_fingerprint_in(connection))


def _fingerprint_in(connection: Connection) -> str:
    known = select(_known.c.fingerprint).where(_known.c.role == _ROLE)
    return str(connection.execute(known).scalar_one_or_none() or "")


def _fingerprint(key: str) -> str:
    return hashlib.sha256(f"fingerprint of {key}".encode()).hexdigest()[:16]


def _fernet(key: str) -> Any:
    # imported here because it loads slowly and farms without secrets do not need it
    from cryptography.fernet import Fernet

    return Fernet(base64.urlsafe_b64encode(hashlib.sha256(key.encode()).digest()))


_REMEDY = "set FARM_SECRET_KEY to the farm's, or share FARM_HOME with the node that made it"


def _checked_reference(text: str, caller: Caller | None) -> str:
    """Return `env:NAME`. Naming a variable takes `operate`: its value may be sent to any address by a node."""
    name = text.removeprefix(_REFERENCE)
    if not _VARIABLE.fullmatch(name) or name.startswith(_OWN_VARIABLES):
        raise InvalidRequest("env:NAME must name a variable of the nodes, but not the farm's own FARM_*", field="key")
    if caller is not None and not caller.may(Scope.OPERATE):
        raise Forbidden(f"key {caller.name!r} may not use env:{name}: reading variables of nodes needs scope operate")
    return text
