"""Detect missing images without pulling them: missing files and folders, and names that a registry does not have.

All other images count as possibly present.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from farm.errors import ImageError
from workers.config import SandboxConfig
from workers.sandboxes.images.dockerfile.dockerfile_source import PREFIX
from workers.sandboxes.images.image import CACHED, alias_of
from workers.sandboxes.images.image_cache import entries, entry_of
from workers.sandboxes.images.image_sources import HOST, ArchiveSource, FolderSource, RegistrySource, source_of

REGISTRY_S = 3.0
"""Maximum time to wait for a registry."""
_DOCKER = "docker://"
_MANIFESTS = ", ".join(
    [
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    ]
)
_LOGINS = ("~/.docker/config.json", "~/.apptainer/docker-config.json", "~/.singularity/docker-config.json")
_ASK_AGAIN_S = 600.0
_may_be_there: dict[str, float] = {}
"""Names that no registry reported as missing, with the time until which the registry is not asked again."""
_FIELD = re.compile(r'(\w+)="([^"]*)"')


def absent_image(config: SandboxConfig, name: str, values: Mapping[str, str]) -> str:
    """Return why an image is missing and what to do; empty if it may exist.

    `values` as in `SandboxSpec.image_values`. Blocks for at most `REGISTRY_S`.
    """
    with suppress(OSError):
        try:
            return _absent(config, name, values)
        except ImageError as error:
            return str(error)
    return ""


def _absent(config: SandboxConfig, name: str, values: Mapping[str, str]) -> str:
    if name == HOST or (name[:1] != "/" and not name.startswith(PREFIX) and alias_of(config, name) is not None):
        return ""
    if name.startswith(CACHED):
        entry_of(config, name.removeprefix(CACHED))
        return ""
    if name.startswith(PREFIX):
        written, _, rest = name.removeprefix(PREFIX).partition("#")
        return _missing(name, Path(written) / (rest.partition("#")[0] or "Dockerfile"))
    source = source_of(config, name, values)
    if isinstance(source, RegistrySource):
        return _unknown_to_registry(config, name)
    written = name.partition(":")[2].removeprefix("//") if isinstance(source, ArchiveSource) and source.kind else name
    # relative to the working directory of a node, which is not known here
    if isinstance(source, FolderSource) and written[:1] != "/":
        return ""
    return _missing(name, Path(getattr(source, "path", written)), written)


def _missing(name: str, path: Path, written: str = "/") -> str:
    """Return why a file is missing; empty for a relative path, which depends on a node's working directory."""
    if written[:1] != "/" or path.exists() or not path.is_absolute():
        return ""
    return f"image {name}: there is no {path} on this machine, which has all nodes: put it there, or fix its name"


def _unknown_to_registry(config: SandboxConfig, name: str) -> str:
    if not name.startswith(_DOCKER) or _may_be_there.get(name, 0.0) > time.monotonic():
        return ""
    host = _registry_lacks(name.removeprefix(_DOCKER))
    if not host or any(name in entry.names for entry in entries(config)):
        _may_be_there[name] = time.monotonic() + _ASK_AGAIN_S
        return ""
    return f"the registry {host} has no image {name}: fix its name or tag, or build one (`farm images build`)"


def _registry_lacks(name: str) -> str:
    registry, _, path = name.partition("/")
    if not path or not (set(registry) & {".", ":"} or registry == "localhost"):
        registry, path = "docker.io", name if "/" in name else f"library/{name}"
    if "@" in registry or _has_login(registry):
        # a registry can hide private images from anonymous requests
        return ""
    path, _, digest = path.partition("@")
    repository, colon, tag = path.rpartition(":")
    repository, tag = (repository, tag) if colon and "/" not in tag else (path, "latest")
    host = "registry-1.docker.io" if registry == "docker.io" else registry
    is_local = urlsplit(f"//{host}").hostname in {"localhost", "127.0.0.1", "::1"}
    url = f"{'http' if is_local else 'https'}://{host}/v2/{repository}/manifests/{digest or tag}"
    try:
        with httpx2.Client(timeout=REGISTRY_S / 3, headers={"accept": _MANIFESTS}) as client:
            answer = client.head(url)
            if answer.status_code == 401 and (token := _token(client, answer.headers.get("www-authenticate", ""))):
                answer = client.head(url, headers={"authorization": f"Bearer {token}"})
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError):
        return ""
    # headers of a registry's own answer, which distinguish it from one of a proxy or another page
    spoken = "docker-distribution-api-version" in answer.headers or "json" in answer.headers.get("content-type", "")
    return registry if answer.status_code == 404 and spoken else ""


def _token(client: httpx2.Client, wanted: str) -> str:
    kind, _, text = wanted.partition(" ")
    fields = dict(_FIELD.findall(text))
    realm = fields.pop("realm", "")
    if kind.lower() != "bearer" or not realm.startswith("https://"):
        return ""
    reply = client.get(realm, params={name: fields[name] for name in ("service", "scope") if name in fields}).json()
    return str(reply.get("token") or reply.get("access_token") or "")


def _has_login(registry: str) -> bool:
    if any(f"{each}_DOCKER_PASSWORD" in os.environ for each in ("APPTAINER", "SINGULARITY")):
        return True
    for file in _LOGINS:
        with suppress(OSError, ValueError, AttributeError):
            known = json.loads(Path(file).expanduser().read_text())
            if known.get("credsStore") or any(registry in each for each in (known.get("auths") or {})):
                return True
    return False
