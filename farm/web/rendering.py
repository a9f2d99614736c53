"""Rendering of pages from templates, and the headers that prevent a policy's text from acting in a browser.

Templates escape HTML. Characters that are no text become visible here, as they could mislead a browser or a reader:
control characters, terminal escapes, marks that change the direction of writing, invisible letters and tags, and
unpaired surrogates, which no page can contain.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
from starlette.responses import Response

from farm.records.trajectory import Message

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
_PICTURES = 0x2400
LONG = 2_000
"""Texts longer than this number of characters are shown folded."""
LONGEST = 200_000
"""The number of characters of a text that a page shows; the rest is in the exports."""

ROOT = "/web"
"""The path prefix of the page."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; font-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def visible(text: object) -> str:
    """Return a text in which every invisible character is written out."""
    shown = str(text).replace("\r\n", "\n")
    cut = len(shown) - LONGEST
    if cut > 0:
        shown = (
            f"{shown[: LONGEST // 2]}\n[… {cut} characters are left out here; the exports have them …]\n"
            + (shown[-LONGEST // 2 :])
        )
    return _HIDDEN.sub(_written_out, shown)


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(_PICTURES + code) if code < 0x20 else f"⟨U+{code:04X}⟩"


def text_of(content: object) -> str:
    """Return the text of a message's content; parts other than text are named."""
    if isinstance(content, list):
        return "".join(_part(part) for part in content)
    return "" if content is None else str(content)


def _part(part: object) -> str:
    if not isinstance(part, dict):
        return str(part)
    if "text" in part:
        return str(part["text"])
    return f"[{part.get('type', 'part')}]"


def reasoning_of(message: Message) -> str:
    """Return the reasoning of a policy before its answer; empty without any."""
    return text_of(message.get("reasoning_content") or message.get("reasoning"))


def arguments_of(raw: Any) -> list[tuple[str, str]]:
    """Return the arguments of a tool call by name; a text that is no JSON object is one without a name."""
    try:
        values = json.loads(raw) if isinstance(raw, str) else raw
    except ValueError:
        return [("", str(raw))]
    if not isinstance(values, dict):
        return [("", str(raw))]
    return [
        (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in values.items()
    ]


def html(name: str, code: int = 200, **values: Any) -> Response:
    """Return the page of a template."""
    return page(rendered(name, **values), code)


def page(text: str, code: int = 200) -> Response:
    """Return a page whose HTML is rendered."""
    return Response(text, code, HEADERS, "text/html; charset=utf-8")


def rendered(name: str, **values: Any) -> str:
    """Render a template; characters that cannot be encoded are replaced."""
    text = _environment().get_template(name).render(**values)
    return text.encode("utf-8", "replace").decode()


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("farm.web"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., Any]] = {
        "visible": visible,
        "duration": duration,
        "number": number,
        "instant": instant,
        "quoted": lambda text: quote(str(text), safe=""),
    }
    environment.filters |= filters
    environment.globals |= {"root": ROOT, "LONG": LONG, "query": query}
    return environment


def query(*parts: Mapping[str, Any], **changes: Any) -> str:
    """Return a query string of some values; later values replace earlier ones, and empty ones are left out."""
    values: dict[str, Any] = {}
    for part in (*parts, changes):
        values |= part
    kept = {name: _plain(value) for name, value in values.items() if value not in (None, "")}
    return "?" + urlencode(kept) if kept else ""


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def duration(seconds: float | None) -> str:
    """Return a duration in a readable unit."""
    if seconds is None:
        return "-"
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs" if seconds > 0 else "0 s"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min {int(seconds % 60)} s"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def number(value: float | None) -> str:
    """Return a number with at most four digits, or a dash."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}"


def instant(value: float | None) -> str:
    """Return seconds since the epoch as a time of day, UTC; with its date if that is not today."""
    if value is None:
        return "-"
    at = datetime.fromtimestamp(value, UTC)
    today = datetime.fromtimestamp(time.time(), UTC).date()
    return at.strftime("%H:%M:%S" if at.date() == today else "%Y-%m-%d %H:%M:%S")
