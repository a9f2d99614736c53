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
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, exists, insert, literal, select

from farm.callers import Caller, Scope
from farm.configuration.secret_values import shown_host
from farm.errors import Forbidden, InvalidRequest, NotAllowed, UsageError
from farm.home import own_home, written_once
from farm.settings import settings
from farm.store.sql.schema import SecretKeyRow

FILE = "secret_key"
_SEALED, _REFERENCE = "sealed:", "env:"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_OWN_VARIABLES = "FARM_"
_LEAST_CHARS = 16
_ROLE = "secrets"
_known = SecretKeyRow.__table__


def sealed(connection: Connection, text: str, caller: Caller | None = None) -> str:
    """Return the stored form of a secret.

    Raises NotAllowed without the farm's secret key; InvalidRequest or Forbidden for a variable that may not be named.
    """
    if not text or text == "none":
        return text
    if text.startswith(_REFERENCE):
        return _checked_reference(text, caller)
    key = _registered_key(connection)
    return _SEALED + str(_fernet(key).encrypt(text.encode()).decode())


def opened(url: URL, text: str) -> str:
    """Decrypt a stored secret, or return the value of the environment variable that it names.

    Raises NotAllowed, which names the missing key or variable.
    """
    if text.startswith(_REFERENCE):
        name = text.removeprefix(_REFERENCE)
        value = None if name.startswith(_OWN_VARIABLES) else os.environ.get(name)
        if value is None:
            raise NotAllowed(f"node {settings().node} has no environment variable {name}, which a secret refers to")
        return value
    if not text.startswith(_SEALED):
        return text
    key = known_secret_key(url)
    if not key:
        raise NotAllowed(f"node {settings().node} {_missing(url)}")
    from cryptography.fernet import InvalidToken

    try:
        return str(_fernet(key).decrypt(text.removeprefix(_SEALED)).decode())
    except InvalidToken:
        raise NotAllowed(f"node {settings().node} has a different secret key than the farm: {_REMEDY}") from None


def sealed_request(connection: Connection, stored: dict[str, Any], caller: Caller | None = None) -> dict[str, Any]:
    """Return the stored form of a request with its secrets sealed."""
    return _with_secrets(stored, lambda text: sealed(connection, text, caller))


def opened_request(url: URL, stored: dict[str, Any]) -> dict[str, Any]:
    """Return a stored request with its secrets decrypted. Raises as `opened`."""
    return _with_secrets(stored, lambda text: opened(url, text))


def shown_request(stored: dict[str, Any]) -> dict[str, Any]:
    """Return a stored request for display: without its secrets, sealed or not, and without its webhook's path."""
    shown = _with_secrets(stored, lambda text: "(secret)" if text else "")
    webhook = stored.get("webhook")
    return shown | {"webhook": webhook | {"url": shown_host(webhook["url"])}} if webhook else shown


def _with_secrets(stored: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    def of_engine(engine: dict[str, Any]) -> dict[str, Any]:
        return {**engine, "engine_key": change(engine["engine_key"])} if engine.get("engine_key") else engine

    result = {**stored, "secrets": {name: change(text) for name, text in stored.get("secrets", {}).items()}}
    if "engines" in stored:
        result["engines"] = [of_engine(engine) for engine in stored["engines"]]
    if "roles" in stored:
        result["roles"] = {role: of_engine(engine) for role, engine in stored["roles"].items()}
    return result


def check_secret_key(connection: Connection) -> None:
    """Raise NotAllowed if the farm has secrets and this process cannot decrypt them."""
    fingerprint = _fingerprint_in(connection)
    if not fingerprint:
        return
    key = known_secret_key(connection.engine.url)
    if not key:
        raise NotAllowed(f"node {settings().node} {_missing(connection.engine.url)}")
    if _fingerprint(key) != fingerprint:
        raise NotAllowed(f"node {settings().node} has a different secret key than the farm: {_REMEDY}")


def has_secrets(connection: Connection) -> bool:
    """Return whether the store has any encrypted secret."""
    return bool(_fingerprint_in(connection))


def secret_key_fault(connection: Connection) -> str:
    """Return the reason this process cannot decrypt the farm's secrets; empty if it can, or there are none."""
    try:
        check_secret_key(connection)
    except UsageError as error:
        return str(error)
    return ""


def known_secret_key(url: URL) -> str:
    """Return the secret key of this process; empty if it has none. Raises InvalidRequest for one that is too short."""
    given = settings().secret_key.strip()
    if not given:
        try:
            given = (_folder(url) / FILE).read_text().strip()
        except OSError:
            return ""
    if len(given) < _LEAST_CHARS:
        raise InvalidRequest(f"the secret key must have at least {_LEAST_CHARS} characters", field="FARM_SECRET_KEY")
    return given


def _registered_key(connection: Connection) -> str:
    """Return the farm's secret key; create it if there is none. Raises NotAllowed if this process has another one."""
    url = connection.engine.url
    if not _fingerprint_in(connection):
        key = known_secret_key(url) or _made(_folder(url))
        unknown = select(literal(_ROLE), literal(_fingerprint(key))).where(~exists().where(_known.c.role == _ROLE))
        connection.execute(insert(_known).from_select(["role", "fingerprint"], unknown))
    check_secret_key(connection)
    return known_secret_key(url)


def _made(folder: Path) -> str:
    if folder == settings().home.absolute():
        own_home(folder)
    return written_once(folder / FILE, secrets.token_urlsafe(32))


def _folder(url: URL) -> Path:
    is_file = url.get_backend_name() == "sqlite" and url.database
    return Path(str(url.database)).absolute().parent if is_file else settings().home.absolute()


def secret_key_file(url: URL) -> Path:
    """Return the path of a store's secret key file, used without FARM_SECRET_KEY."""
    return _folder(url) / FILE


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


def _missing(url: URL) -> str:
    return f"has no secret key of the farm, which keys of engines are encrypted with ({_folder(url) / FILE}): {_REMEDY}"


def _checked_reference(text: str, caller: Caller | None) -> str:
    """Return `env:NAME`. Naming a variable takes `operate`: its value may be sent to any address by a node."""
    name = text.removeprefix(_REFERENCE)
    if not _VARIABLE.fullmatch(name) or name.startswith(_OWN_VARIABLES):
        raise InvalidRequest("env:NAME must name a variable of the nodes, but not the farm's own FARM_*", field="key")
    if caller is not None and not caller.may(Scope.OPERATE):
        raise Forbidden(f"key {caller.name!r} may not use env:{name}: reading variables of nodes needs scope operate")
    return text
