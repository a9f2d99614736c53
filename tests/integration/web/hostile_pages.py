"""Hostile content, the views that show it, and a parser of pages."""

from __future__ import annotations

from html.parser import HTMLParser

HOSTILE = (
    '<script>alert(1)</script><img src=x onerror="alert(2)">"\'><a href="javascript:alert(3)">{{7*7}}\x1b[31m\u202e'
)
VIEWS = (
    *("/", "/batches/{b}", "/batches/{b}/rollouts", "/batches/{b}/failures", "/batches/{b}/figures"),
    "/batches/{b}/selection",
    *("/groups/{b}.0", "/rollouts/{b}.0.0", "/rollouts/{b}.0.0/tokens", "/rollouts/{b}.0.0/timeline"),
    "/rollouts/{b}.0.0/terminal",
    *("/rollouts/{b}.0.0/page.html", "/cluster", "/alarms", "/batches/{b}/rollouts?state=queued", "/rollouts/{b}.0.1"),
)


class ParsedPage(HTMLParser):
    """The elements of a page, their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data
