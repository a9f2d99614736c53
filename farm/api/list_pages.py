"""Pages of lists: each of a bounded size; the last item of a page is the cursor of the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from starlette.requests import Request

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ListPage:
    """A page of a list. `next_query` is the query for the next one; None after the last."""

    items: Sequence[Any]
    next_query: Mapping[str, str] | None

    def headers(self, request: Request) -> dict[str, str]:
        """Return the header with the link to the next page, if there may be one."""
        if self.next_query is None:
            return {}
        query = urlencode({**request.query_params, **self.next_query})
        return {"link": f'<{quote(request.url.path)}?{query}>; rel="next"'}


def list_page(items: Sequence[T], limit: int, name: str, key: Callable[[T], object]) -> ListPage:
    """Return a page of up to `limit`; a full page has a next one, with its last item's key as the cursor."""
    full = len(items) >= limit
    return ListPage(items, {name: str(key(items[-1])), "limit": str(limit)} if full else None)


def page_after(items: Sequence[T], limit: int, last: str | None, key: Callable[[T], str]) -> ListPage:
    """Return a page of a list in memory: the items with a key greater than `last`, in order of the key."""
    later = sorted((item for item in items if last is None or key(item) > last), key=key)[:limit]
    return list_page(later, limit, "after", key)
