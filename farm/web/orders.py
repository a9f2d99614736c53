"""Orders given on the page: cancel and rescore rollouts, drain nodes, drain, pause and resume engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from farm.api.endpoints import Endpoints
from farm.callers import Scope, current_caller
from farm.client.local import LocalFarm
from farm.errors import InvalidRequest, NotFound
from farm.web.rendering import HEADERS, ROOT
from farm.web.sign_in import read_form

Order = Callable[[LocalFarm, str], object]
_SUBMITTERS, _OPERATORS = (Scope.SUBMIT, Scope.OPERATE), (Scope.OPERATE,)
_ORDERS: Mapping[str, tuple[tuple[Scope, ...], Order]] = {
    "cancel": (_SUBMITTERS, lambda farm, id: farm.cancel(id)),
    "rescore": (_SUBMITTERS, lambda farm, id: farm.rescore(id)),
    "drain-node": (_OPERATORS, lambda farm, id: farm.drain_node(id)),
    "drain-engine": (_OPERATORS, lambda farm, id: farm.drain_engine(id)),
    "pause-engine": (_OPERATORS, lambda farm, id: farm.orders.order_pause("drain", _who(), [id])),
    "resume-engine": (_OPERATORS, lambda farm, id: farm.orders.order_pause("", _who(), [id])),
}
"""The orders, each with the scopes of which a key needs one."""


class Orders:
    """Executes orders, and redirects to the page they were given on."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    async def carry_out(self, request: Request) -> Response:
        """Execute one order, named in the path, for the `id` in the form."""
        name = request.path_params["name"]
        if name not in _ORDERS:
            raise NotFound(f"there is no order {name!r}: use one of {', '.join(_ORDERS)}")
        scopes, order = _ORDERS[name]
        current_caller().check(*scopes)
        form = await read_form(request)
        id = form.get("id", "")
        if not id:
            raise InvalidRequest("the form must name the target of the order", field="id")
        await self._endpoints.run(order, self._endpoints.farm, id)
        back = form.get("back", "/")
        if not back.startswith("/") or back.startswith(("//", "/\\")) or not back.isprintable():
            back = "/"
        return RedirectResponse(ROOT + back, 303, HEADERS)


def _who() -> str:
    return f"{current_caller().name} on the page"
