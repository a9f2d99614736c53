"""A SWE-ReX deployment whose sandboxes are borrowed from a farm; use it wherever a deployment is expected.

pip install swe-rex aiohttp
farm api --host 0.0.0.0 --port 8600 --speak swe-rex

env = SWEEnv(deployment=FarmDeployment("http://HOST:8600", KEY, {"image": "docker://python:3.11"}), ...)
"""

from __future__ import annotations

import logging
import time
from typing import Any

import aiohttp
from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
from swerex.exceptions import DeploymentNotStartedError, DeploymentStartupError
from swerex.runtime.abstract import IsAliveResponse
from swerex.runtime.remote import RemoteRuntime
from swerex.utils.log import get_logger

_POLL_S = 10.0


class FarmDeployment(AbstractDeployment):  # type: ignore[misc]
    """One sandbox of the API at `url`. It ends with `stop`, or if its client is silent for `lease_s`.

    With a `name`, the open sandbox of that name is reused; without a name each start borrows a new one.
    """

    def __init__(
        self,
        url: str,
        key: str,
        spec: dict[str, Any] | None = None,
        *,
        name: str = "",
        lease_s: float = 1800.0,
        start_s: float = 1800.0,
        logger: logging.Logger | None = None,
    ) -> None:
        self.logger = logger or get_logger("rex-deploy")
        self._url, self._key = url.rstrip("/"), key
        self._borrow = {"spec": spec or {}, "lease_s": lease_s, **({"name": name} if name else {})}
        self._start_s = start_s
        self._hooks = CombinedDeploymentHook()
        self._runtime: RemoteRuntime | None = None

    def add_hook(self, hook: DeploymentHook) -> None:
        self._hooks.add_hook(hook)

    async def start(self) -> None:
        """Borrow a sandbox, and return once it runs.

        Raises DeploymentStartupError, and then leaves no sandbox behind.
        """
        self._hooks.on_custom_step("Borrowing a sandbox")
        deadline = time.monotonic() + self._start_s
        state = await self._ask("POST", "", json=self._borrow)
        sandbox_id = state["sandbox_id"]
        runtime = RemoteRuntime(
            host=f"{self._url}/swe-rex/{sandbox_id}", auth_token=self._key, timeout=60.0, logger=self.logger
        )
        try:
            while state["state"] in ("waiting", "starting") and time.monotonic() < deadline:
                state = await self._ask("GET", f"/{sandbox_id}", params={"wait_s": _POLL_S})
                # this also renews the lease
                await runtime.is_alive()
            if state["state"] != "running":
                why = state["ended_why"] or f"it is {state['state']} after {self._start_s:g} s"
                raise DeploymentStartupError(f"sandbox {sandbox_id} did not start: {why}")
        except BaseException:
            await runtime.close()
            raise
        self._runtime = runtime

    async def stop(self) -> None:
        """End the sandbox. Idempotent."""
        if self._runtime is not None:
            runtime, self._runtime = self._runtime, None
            await runtime.close()

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:  # noqa: ASYNC109 - its own interface
        return await self.runtime.is_alive(timeout=timeout)

    @property
    def runtime(self) -> RemoteRuntime:
        if self._runtime is None:
            raise DeploymentNotStartedError
        return self._runtime

    async def _ask(self, method: str, path: str, **sent: Any) -> dict[str, Any]:
        headers = {"X-API-Key": self._key}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(method, f"{self._url}/v1/sandboxes{path}", **sent) as answer,
        ):
            body: dict[str, Any] = await answer.json()
            if answer.status >= 400:
                error = body["error"]
                raise DeploymentStartupError(f"the farm refused the request: {error['field']} {error['message']}")
            return body
