"""The routes of SWE-ReX's server, each below a borrowed sandbox.

Errors are `{"swerexception": …}`, which the client raises as the class that it names. Invalid requests, for example
without a key, of another form or for an unknown path, are refused with `{"detail": …}`.
"""

from __future__ import annotations

import asyncio
import io
import tempfile
import zipfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from starlette.routing import BaseRoute

from farm import task_archive
from farm.api.auth import RouteScopes
from farm.api.endpoints import Endpoints
from farm.api.protocols import WireProtocol, form_fields, refuse_with_detail, spooled
from farm.api.schemas import ApiRequest
from farm.api.swe_rex import rex_sandbox
from farm.api.swe_rex.rex_sandbox import (
    RexAction,
    RexCommand,
    RexError,
    RexInterrupt,
    RexReadRequest,
    RexSandbox,
    RexSessionEnd,
    RexSessionRequest,
    RexWriteRequest,
)
from farm.callers import Scope, current_caller
from farm.errors import FarmError, Forbidden, InvalidRequest
from farm.records.lending.borrowed_sandbox import SandboxState, check_borrower
from farm.records.lending.sandbox_calls import MAX_FILE_BYTES
from farm.records.request_values import Request
from farm.task_archive import MAX_ARCHIVE_FILES

T = TypeVar("T", bound=Request)

_ONE = "/{reference}"
_UPLOADS = 2
"""Large uploads that are unpacked at a time: each is in memory more than once."""


_CHUNK = 1 << 20
_TRUE = ("1", "on", "t", "true", "y", "yes")
_FALSE = ("", "0", "f", "false", "n", "no", "off")

_USES = (Scope.SUBMIT, Scope.OPERATE)
_VERBS = ("create_session", "run_in_session", "close_session", "execute", "read_file", "write_file", "upload", "close")
_SCOPES: RouteScopes = {
    ("GET", "/"): Scope.READ,
    ("GET", f"{_ONE}/is_alive"): _USES,
    **{("POST", f"{_ONE}/{verb}"): _USES for verb in _VERBS},
}


@dataclass(frozen=True, slots=True)
class RexUpload:
    """The bytes of a file for a path; if `packed`, a tar for a folder."""

    path: str
    data: bytes
    packed: bool


def read_upload(body: IO[bytes], content_type: str) -> RexUpload:
    """Return the upload in a form. Raises InvalidRequest naming the field, and RexError for a bad zip."""
    with body:
        fields = form_fields(body, content_type)
        file, path = fields.get("file"), fields.get("target_path")
        if file is None:
            raise InvalidRequest("is missing", field="file")
        if path is None or not path.data:
            raise InvalidRequest("is missing", field="target_path")
        unzip = fields["unzip"].data.decode("utf-8", "replace").lower() if "unzip" in fields else ""
        if unzip not in _TRUE + _FALSE:
            raise InvalidRequest("must be true or false", field="unzip")
    try:
        target = path.data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"is not UTF-8, at byte {error.start}", field="target_path") from None
    if unzip in _TRUE:
        return RexUpload(target, _folder_of(file.data), packed=True)
    _check_size(len(file.data))
    return RexUpload(target, file.data, packed=False)


def _folder_of(data: bytes) -> bytes:
    """Convert a zip to a tar."""
    with tempfile.TemporaryDirectory(prefix="farm-upload-") as folder:
        top = Path(folder) / "files"
        top.mkdir()
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                _extract(archive, top)
            packed = io.BytesIO()
            task_archive.pack(top, packed)
        except RexError:
            raise
        except (OSError, InvalidRequest) as error:
            raise RexError(rex_sandbox.PLAIN, f"the zip cannot be unpacked: {_without(str(error), folder)}") from None
        except Exception as error:
            # for a broken zip the library raises arbitrary exceptions
            reason = str(error) if isinstance(error, zipfile.BadZipFile) else f"{type(error).__name__}: {error}"
            raise RexError(rex_sandbox.BAD_ZIP, _without(reason, folder)) from None
    _check_size(len(packed.getvalue()))
    return packed.getvalue()


def _extract(archive: zipfile.ZipFile, top: Path) -> None:
    """Extract a zip below a folder, whatever its names are."""
    n_bytes = 0
    for n_files, entry in enumerate(archive.infolist(), start=1):
        if n_files > MAX_ARCHIVE_FILES:
            raise RexError(rex_sandbox.PLAIN, f"the zip has more than {MAX_ARCHIVE_FILES} files")
        path = top.joinpath(*_parts(entry.filename))
        if entry.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(entry) as source, path.open("wb") as file:
            # an entry's declared size may be wrong
            while chunk := source.read(_CHUNK):
                n_bytes += len(chunk)
                _check_size(n_bytes)
                file.write(chunk)
        path.chmod(0o755 if entry.external_attr >> 16 & 0o100 else 0o644)


def _parts(name: str) -> Iterator[str]:
    return (part for part in name.replace("\\", "/").split("/") if part not in ("", ".", ".."))


def _check_size(n_bytes: int) -> None:
    if n_bytes > MAX_FILE_BYTES:
        raise RexError(rex_sandbox.PLAIN, f"an upload has at most {MAX_FILE_BYTES} bytes: send it in pieces")


def _without(message: str, folder: str) -> str:
    """Return a message without the path of a temporary folder of this process."""
    return message.replace(f"{folder}/files/", "").replace(folder, "")


class _Routes:
    """The verbs, on the endpoints of an API."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._sandboxes = endpoints.farm.sandboxes
        self._uploads = asyncio.Semaphore(_UPLOADS)

    def routes(self) -> list[BaseRoute]:
        endpoints = self._endpoints
        return [
            endpoints.get("/", lambda request: {"message": "hello world"}),
            endpoints.get(f"{_ONE}/is_alive", self._is_alive),
            self._verb("create_session", RexSessionRequest, RexSandbox.create_session),
            endpoints.route("POST", f"{_ONE}/run_in_session", self._run),
            self._verb("close_session", RexSessionEnd, RexSandbox.close_session),
            self._verb("execute", RexCommand, RexSandbox.execute),
            self._verb("read_file", RexReadRequest, RexSandbox.read_file),
            self._verb("write_file", RexWriteRequest, RexSandbox.write_file),
            endpoints.route("POST", f"{_ONE}/upload", self._upload, takes_body=False),
            endpoints.route("POST", f"{_ONE}/close", self._close, takes_body=False),
        ]

    def _verb(
        self, name: str, kind: type[T], verb: Callable[[RexSandbox, T], Awaitable[Mapping[str, Any]]]
    ) -> BaseRoute:
        async def answer(request: ApiRequest) -> Any:
            wanted = request.parse_body(kind)
            return await _response_of(verb(self._sandbox(request, name), wanted))

        return self._endpoints.route("POST", f"{_ONE}/{name}", answer)

    def _sandbox(self, request: ApiRequest, name: str) -> RexSandbox:
        request_id = request.headers.get("x-request-id", "")
        return RexSandbox(
            self._endpoints, request.path["reference"], f"{name} {request_id}" if request_id else "", request.data
        )

    async def _run(self, request: ApiRequest) -> Any:
        body, sandbox = request.body, self._sandbox(request, "run_in_session")
        if isinstance(body, dict) and body.get("action_type") == "bash_interrupt":
            return await _response_of(sandbox.interrupt(request.parse_body(RexInterrupt)))
        return await _response_of(sandbox.run(request.parse_body(RexAction)))

    def _is_alive(self, request: ApiRequest) -> Mapping[str, Any]:
        """Return whether a sandbox runs. Its client is alive, so this renews the lease."""
        state = self._sandboxes.get(request.path["reference"])
        check_borrower(current_caller(), state.sandbox_id, state.borrower)
        if not state.ended and state.lease_left_s < state.lease_s / 2:
            state = self._sandboxes.renew(state.sandbox_id)
        if state.state is SandboxState.RUNNING:
            return {"is_alive": True, "message": ""}
        message = str(state.ended_error()) if state.ended else f"sandbox {state.sandbox_id} is {state.state}"
        return {"is_alive": False, "message": message}

    async def _upload(self, request: ApiRequest) -> Any:
        body = await spooled(request)
        async with self._uploads:
            try:
                content_type = request.headers.get("content-type", "")
                upload = await self._endpoints.run(read_upload, body, content_type)
            except RexError as error:
                return error.response()
            sandbox = self._sandbox(request, "upload")
            return await _response_of(sandbox.put(upload.path, upload.data, upload.packed))

    async def _close(self, request: ApiRequest) -> Any:
        """End the sandbox. Idempotent."""

        async def stop() -> Mapping[str, Any]:
            await self._endpoints.run(self._sandboxes.stop, request.path["reference"])
            return {}

        return await _response_of(stop())


async def _response_of(doing: Awaitable[Any]) -> Any:
    """Return the result, or the response that makes the client raise the error."""
    try:
        return await doing
    except RexError as error:
        return error.response()
    except Forbidden:
        raise
    except FarmError as error:
        return RexError(rex_sandbox.PLAIN, str(error)).response()


PROTOCOL = WireProtocol(lambda endpoints: _Routes(endpoints).routes(), refuse_with_detail, _SCOPES)
