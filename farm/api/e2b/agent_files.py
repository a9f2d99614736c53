"""The files of a sandbox as E2B's agent serves them: metadata by Connect, contents by plain HTTP."""

from __future__ import annotations

import base64
import gzip
import zlib
from base64 import b64encode
from datetime import UTC, datetime
from stat import S_IFDIR, S_IFLNK, S_IFREG, filemode
from typing import IO, Annotated, Any

from pydantic import Field
from starlette.responses import Response

from farm.api.e2b.connect_rpc import (
    ConnectCode,
    ConnectError,
    Message,
    connect_error,
    file_error,
    missing_sandbox,
    unary_message,
    unary_response,
)
from farm.api.endpoints import Endpoints
from farm.api.protocols import call_sandbox, form_parts, spooled
from farm.api.schemas import ApiRequest
from farm.client import serialization
from farm.client.request_checks import checked
from farm.errors import FarmError, InvalidRequest, NotFound, SandboxEnded
from farm.records.lending.sandbox_calls import (
    MAX_FILE_BYTES,
    FileContent,
    FileEntry,
    FileList,
    FilePath,
    ListFilesCall,
    MakeFolderCall,
    MoveFileCall,
    ReadCall,
    RemoveFileCall,
    WriteCall,
)
from farm.records.request_values import Request

SANDBOX_HEADER = "e2b-sandbox-id"
_OWN_USERS = ("", "root")
"""The names that mean the sandbox's own user."""

_TYPES = {"file": "FILE_TYPE_FILE", "folder": "FILE_TYPE_DIRECTORY", "link": "FILE_TYPE_SYMLINK"}
_KINDS = {"file": S_IFREG, "folder": S_IFDIR, "link": S_IFLNK}
_OCTETS = "application/octet-stream"


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


class PathRequest(Message):
    """A file or folder to inspect, create or remove."""

    path: FilePath


class ListDirRequest(Message):
    """A folder, listed recursively down to a depth; 0 means 1."""

    path: FilePath
    depth: Annotated[int, Field(ge=0, le=100)] = 1


class MoveRequest(Message):
    source: FilePath
    destination: FilePath


class AgentFiles:
    """The verbs, on the endpoints of an API."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    async def stat(self, request: ApiRequest) -> Response:
        """Return the metadata of a file, folder or link."""
        sandbox = AgentSandbox(self._endpoints, request)
        wanted = await unary_message(request, PathRequest)
        return unary_response({"entry": _info(await _entry(sandbox, wanted.path))})

    async def list_dir(self, request: ApiRequest) -> Response:
        sandbox = AgentSandbox(self._endpoints, request)
        wanted = await unary_message(request, ListDirRequest)
        listing: FileList = await sandbox.call_file(ListFilesCall(path=wanted.path, depth=wanted.depth or 1))
        return unary_response({"entries": list(map(_info, listing.files))})

    async def make_dir(self, request: ApiRequest) -> Response:
        """Create a folder. The error distinguishes an existing folder from a file of that name."""
        sandbox = AgentSandbox(self._endpoints, request)
        wanted = await unary_message(request, PathRequest)
        try:
            await sandbox.call_file(MakeFolderCall(path=wanted.path))
        except ConnectError as error:
            if error.code is ConnectCode.ALREADY_EXISTS and (await _entry(sandbox, wanted.path)).kind != "folder":
                raise ConnectError(ConnectCode.INVALID_ARGUMENT, f"{wanted.path} exists and is not a folder") from None
            raise
        return unary_response({"entry": _info(await _entry(sandbox, wanted.path))})

    async def move(self, request: ApiRequest) -> Response:
        sandbox = AgentSandbox(self._endpoints, request)
        wanted = await unary_message(request, MoveRequest)
        await sandbox.call_file(MoveFileCall(path=wanted.source, target=wanted.destination))
        return unary_response({"entry": _info(await _entry(sandbox, wanted.destination))})

    async def remove(self, request: ApiRequest) -> Response:
        """Remove a file, or a folder with its contents. Idempotent."""
        sandbox = AgentSandbox(self._endpoints, request)
        wanted = await unary_message(request, PathRequest)
        try:
            await sandbox.call_file(RemoveFileCall(path=wanted.path))
        except ConnectError as error:
            if error.code is not ConnectCode.NOT_FOUND:
                raise
        return unary_response({})

    async def unsupported(self, request: ApiRequest) -> Response:
        """Refuse to watch a folder."""
        raise ConnectError(ConnectCode.UNIMPLEMENTED, "folders cannot be watched here: list them from time to time")

    async def read(self, request: ApiRequest) -> Response:
        """Return the contents of a file."""
        path = _path_of(request)
        content: FileContent = await AgentSandbox(self._endpoints, request).call_file(ReadCall(path=path))
        return Response(await self._endpoints.run(lambda: content.contents), media_type=_OCTETS)

    async def write(self, request: ApiRequest) -> Response:
        """Write one file from the body of a request or from a form, or the several files of a form."""
        sandbox = AgentSandbox(self._endpoints, request)
        content_type = request.headers.get("content-type", "")
        with await spooled(request) as body:
            if content_type.partition(";")[0].strip().lower() == _OCTETS:
                encoding = request.headers.get("content-encoding", "")
                written = [(_path_of(request), await self._endpoints.run(_octets, body, encoding))]
            else:
                written = await self._endpoints.run(_form_files, body, content_type, request.query.get("path", ""))
        entries = []
        for path, data in written:
            await sandbox.call_file(await self._endpoints.run(_write_call, path, data))
            entry = await _entry(sandbox, path)
            entries.append({"name": entry.name, "path": entry.path, "type": "file"})
        return Response(serialization.written(entries), media_type="application/json")


async def _entry(sandbox: AgentSandbox, path: str) -> FileEntry:
    listing: FileList = await sandbox.call_file(ListFilesCall(path=path, depth=0))
    return listing.files[0]


def _info(entry: FileEntry) -> dict[str, Any]:
    info = {
        "name": entry.name,
        "path": entry.path,
        "type": _TYPES.get(entry.kind, "FILE_TYPE_UNSPECIFIED"),
        "size": str(entry.size),
        "mode": entry.mode,
        "permissions": filemode(entry.mode | _KINDS.get(entry.kind, 0)),
        "owner": entry.owner,
        "group": entry.group,
        "modifiedTime": datetime.fromtimestamp(entry.modified_at, UTC).isoformat().replace("+00:00", "Z"),
    }
    return {**info, "symlinkTarget": entry.target} if entry.kind == "link" else info


def _path_of(request: ApiRequest) -> str:
    if "signature" in request.query:
        signed = "addresses with a signature are not served: read and write files with the client"
        raise ConnectError(ConnectCode.UNAUTHENTICATED, signed)
    path = request.query.get("path", "")
    if not path:
        raise ConnectError(ConnectCode.INVALID_ARGUMENT, "path is missing in the query")
    return path


def _octets(body: IO[bytes], encoding: str) -> bytes:
    """Return the bytes of a file as they were sent, or decompressed."""
    if not encoding:
        return body.read()
    if encoding.strip().lower() != "gzip":
        raise ConnectError(ConnectCode.INVALID_ARGUMENT, f"content-encoding {encoding!r:.100} is unknown: send gzip")
    try:
        with gzip.open(body) as unpacked:
            # decompressed data may be of any size
            return unpacked.read(MAX_FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ConnectError(ConnectCode.INVALID_ARGUMENT, f"the body is not gzip: {error}") from None


def _form_files(body: IO[bytes], content_type: str, path: str) -> list[tuple[str, bytes]]:
    """Return the files of a form with their paths: the query's path, else the files' own names."""
    try:
        parts = form_parts(body, content_type)
    except InvalidRequest as error:
        raise ConnectError(ConnectCode.INVALID_ARGUMENT, f"the form {error.complaints[0][1]}") from None
    files = [part for name, part in parts if name == "file"]
    if not files:
        raise ConnectError(ConnectCode.INVALID_ARGUMENT, "the form has no file")
    if path:
        if len(files) > 1:
            raise ConnectError(ConnectCode.INVALID_ARGUMENT, "the query has one path, but the form has several files")
        return [(path, files[0].data)]
    if not all(part.file_name for part in files):
        raise ConnectError(ConnectCode.INVALID_ARGUMENT, "a file of the form has no name, which is its path")
    return [(part.file_name, part.data) for part in files]


def _write_call(path: str, data: bytes) -> WriteCall:
    if len(data) > MAX_FILE_BYTES:
        large = f"{path}: a file has at most {MAX_FILE_BYTES} bytes as it is sent: send it in pieces"
        raise ConnectError(ConnectCode.RESOURCE_EXHAUSTED, large, 413)
    return checked(WriteCall, {"path": path, "data": b64encode(data).decode()})
