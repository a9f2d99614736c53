"""The sites that a search may show: a policy must not find pages that reveal the answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

import httpx2

_DOMAIN = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")


@dataclass(frozen=True, slots=True)
class Domains:
    """Allowed and blocked domains, including subdomains. Empty `allowed` allows all; blocking takes precedence."""

    allowed: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()

    @classmethod
    def of(cls, allowed: str, blocked: str) -> Domains:
        """Parse comma-separated lists. Raises ValueError, as a misspelt domain would silently block nothing."""
        return cls(_split(allowed), _split(blocked))

    def let_through(self, url: str) -> bool:
        """Return whether a result may be shown; always False if it is not a web page."""
        try:
            host = _host(url)
        except ValueError:
            return False
        return not _within(host, self.blocked) and (not self.allowed or _within(host, self.allowed))


def _split(domains: str) -> tuple[str, ...]:
    names = [name.strip().removeprefix("*.").lstrip(".") for name in domains.split(",") if name.strip()]
    return tuple(_host(f"https://{name}", domain_only=True) for name in names)


def _host(url: str, *, domain_only: bool = False) -> str:
    """Return the host of a web page in normalized form. Raises ValueError."""
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError) as error:
        raise ValueError(f"{url!r} is not a URL: {error}") from None
    host = parsed.raw_host.decode("ascii").lower().rstrip(".")
    if parsed.scheme not in ("http", "https") or not _DOMAIN.fullmatch(host):
        raise ValueError(f"{url!r} is not the URL of a web page")
    if domain_only and parsed != httpx2.URL(f"https://{parsed.host}"):
        raise ValueError(f"{url.removeprefix('https://')!r} is not a domain")
    return host


def _within(host: str, domains: tuple[str, ...]) -> bool:
    return any(host == domain or host.endswith(f".{domain}") for domain in domains)
