"""Secrets in settings, variables and addresses, and texts with secrets removed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import unquote, urlsplit

HIDDEN = "***"
_LOGIN = re.compile(r"(://[^/@\s:]*:)(?!\d+/)(\S+)(?=@)")
"""The password of an address: unescaped, it may contain a slash or an @."""
_VALUE = re.compile(r"([?&][\w-]*(?:password|passwd|token|secret|signature|sig|key)=)([^&\s\"']+)", re.IGNORECASE)
"""A value in an address that grants access."""
_HEADER = re.compile(r"(\b(?i:Basic|Bearer) +)(?=[\w+/.~-]*(?:[\d=]|[a-z][A-Z]))([\w+/=.~-]{8,})")
"""The credentials of a quoted request; must not match words of a sentence."""
_SECRET_NAME = re.compile(r"(^|_)(PASSWORD|PASSWD|TOKEN|SECRET|(API|ACCESS|SECRET)_?KEY)$", re.IGNORECASE)


def without_credentials(text: str) -> str:
    """Return a text with passwords and tokens of addresses, and credentials of requests, replaced."""
    for pattern in (_LOGIN, _VALUE, _HEADER):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text


def has_credentials(text: str) -> bool:
    """Return whether an address in a text has a password or a token."""
    return _LOGIN.search(text) is not None or _VALUE.search(text) is not None


def shown_host(url: str) -> str:
    """Return the scheme and host of an address whose path may be a secret, such as a chat's webhook."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" + ("/..." if parts.path.strip("/") else "")


def secrets_in(text: str) -> Iterator[str]:
    """Yield the passwords and tokens in a text's addresses, both as written and decoded."""
    for pattern in (_LOGIN, _VALUE):
        for match in pattern.finditer(text):
            yield from {match[2], unquote(match[2])}


def secret_variables(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the secrets among environment variables: by their names, and in addresses."""
    for name, value in variables.items():
        if _SECRET_NAME.search(name):
            yield value
        yield from secrets_in(value)


def secret_settings(secret: Iterable[object], others: Iterable[object]) -> Iterator[str]:
    """Yield the secrets of settings: whole secret values, and those in the addresses of others."""
    for value in secret:
        if isinstance(value, Mapping):
            yield from secret_variables({str(name): str(each) for name, each in value.items()})
        elif value:
            yield str(value)
    for value in others:
        yield from secrets_in(str(value))
