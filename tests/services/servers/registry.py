"""An image registry on 127.0.0.1, as far as a pulling client needs one (the OCI distribution specification)."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.services.images import MANIFEST, oci_image


class Registry:
    """Has one image, under any name and tag; `requested_paths` are the requested paths."""

    def __init__(self, root: Path) -> None:
        manifest, blobs = oci_image(root)
        self.manifest = manifest
        self.blobs = {f"sha256:{hashlib.sha256(blob).hexdigest()}": blob for blob in (*blobs, manifest)}
        self.requested_paths: list[str] = []
        self.status: int | None = None
        """Overrides the status of each answer."""

    def content_at(self, path: str) -> tuple[str, bytes] | None:
        """Return the media type and bytes at a path; None if there is nothing."""
        if path == "/v2/":
            return "application/json", b"{}"
        _, kind, name = path.rsplit("/", 2)
        if kind == "manifests" and not name.startswith("sha256:"):
            return MANIFEST, self.manifest
        blob = self.blobs.get(name)
        media_type = MANIFEST if kind == "manifests" else "application/octet-stream"
        return None if blob is None else (media_type, blob)


@contextmanager
def registry(root: Path) -> Iterator[tuple[str, Registry]]:
    """Yield the prefix of its images' names, and the registry."""
    content = Registry(root)

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, with_body: bool) -> None:
            content.requested_paths.append(self.path)
            result = content.content_at(self.path)
            media_type, body = result or ("application/json", b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}')
            self.send_response(content.status or (404 if result is None else 200))
            self.send_header("Content-Type", media_type)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Docker-Content-Digest", f"sha256:{hashlib.sha256(body).hexdigest()}")
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Write nothing into pytest's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"docker://127.0.0.1:{server.server_port}", content
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
