"""The sandbox that a request to E2B's agent names, and calls to it."""

from __future__ import annotations

import base64
from typing import Any

from farm.api.e2b.connect_rpc import ConnectCode, ConnectError, connect_error, file_error, missing_sandbox
from farm.api.endpoints import Endpoints
from farm.api.protocol_parts import call_sandbox
from farm.api.schemas import ApiRequest
from farm.errors import FarmError, InvalidRequest, NotFound, SandboxEnded
from farm.records.request_values import Request

SANDBOX_HEADER = "e2b-sandbox-id"
_OWN_USERS = ("", "root")
"""The names that mean the sandbox's own user."""


class AgentSandbox:
    """Calls raise SandboxMissing if the sandbox does not exist, and ConnectError for other errors."""

    def __init__(self, endpoints: Endpoints, request: ApiRequest) -> None:
        self._endpoints = endpoints
        self.reference = request.headers.get(SANDBOX_HEADER, "")
        if not self.reference:
            raise ConnectError(ConnectCode.INVALID_ARGUMENT, f"the request must have the header {SANDBOX_HEADER}")
        user = _user_of(request)
        if user not in _OWN_USERS:
            wrong = f"there is no user {user!r:.100} here: leave it out for the sandbox's own user"
            raise ConnectError(ConnectCode.UNAUTHENTICATED, wrong)

    async def check(self) -> None:
        """Raise SandboxMissing if it does not exist."""
        try:
            state = await self._endpoints.run(self._endpoints.farm.sandboxes.get, self.reference)
        except NotFound as error:
            raise missing_sandbox(error) from None
        if state.ended:
            raise missing_sandbox(state.ended_error())

    async def call(self, call: Request) -> Any:
        """Return the result of a call."""
        try:
            return await self._called(call)
        except InvalidRequest as error:
            raise connect_error(error) from None

    async def call_file(self, call: Request) -> Any:
        """Return the result of a call about a file, whose error is the kernel's."""
        try:
            return await self._called(call)
        except InvalidRequest as error:
            raise file_error(error) from None

    async def _called(self, call: Request) -> Any:
        try:
            return await call_sandbox(self._endpoints, self.reference, call)
        except InvalidRequest:
            raise
        except SandboxEnded as error:
            raise missing_sandbox(error) from None
        except NotFound as error:
            # either the sandbox or the requested object is missing
            await self.check()
            raise connect_error(error) from None
        except FarmError as error:
            raise connect_error(error) from None


def _user_of(request: ApiRequest) -> str:
    """Return the user that a request acts as, "" if it names none."""
    if "username" in request.query:
        return request.query["username"]
    scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        user, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except ValueError:
        return ""
    # a user with a password carries the key instead
    return "" if password else user
