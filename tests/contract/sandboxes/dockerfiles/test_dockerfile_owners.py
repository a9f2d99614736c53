"""Owners of files that COPY and ADD make, as in BuildKit's own copies."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from typing import Any

import pytest

from testkit.scratch_folder import sandbox_config
from tests.contract.sandboxes.dockerfiles.test_dockerfiles import built, context, output_of
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.images.image import set_alias

__all__ = ["context"]

Run = Callable[[Any], Any]
Start = Callable[..., Sandbox]

DOCKERFILE = """\
FROM debian:12 AS build
RUN mkdir -p /out/sub/deep /out/plain && touch /out/a /out/sub/b /out/sub/deep/c /out/plain/d /run.sh \\
  && ln -s a /out/l && ln /out/a /out/hard && chmod 700 /out && chown -R 1500:1600 /out && chown 0:0 /out/plain/d \\
  && chown 33:44 /run.sh /out/sub && chmod 2755 /out/sub && chmod 4750 /run.sh
FROM debian:12
RUN mkdir -p /there/sub /over && touch /over/a && chown -R 7:8 /there /over
COPY --from=build /out/ /new/
COPY --link --from=build /out /linked/below/
COPY --from=build /out/ /there/
COPY --from=build /out/a /run.sh /single/
COPY --from=build /out/s* /glob/
COPY --from=build --chown=5:6 /out/ /given/made/
COPY --from=build --chown=5 /run.sh /numbered
COPY --from=build --chown=:6 /run.sh /grouped
COPY --from=build --parents /out/sub/b /parents/
COPY --from=build --chmod=700 /out/sub /moded/
COPY tree/a /over/
COPY --chown=9:9 tree/ /tree/
USER 1500
WORKDIR /at/work
USER root
ADD packed.tar /packed/
ADD --chown=9:9 packed.tar /packed-of-9/
RUN --mount=type=bind,from=build,source=/out/sub,target=/mnt stat -c %u:%g /mnt/b >/mounted
"""
OWNERS = {
    "/new": "755 0:0",
    "/new/a": "644 1500:1600",
    "/new/hard": "644 1500:1600",
    "/new/l": "777 0:0",
    "/new/sub": "2755 33:44",
    "/new/sub/deep/c": "644 1500:1600",
    "/new/plain": "755 1500:1600",
    "/new/plain/d": "644 0:0",
    "/linked": "755 0:0",
    "/linked/below": "755 0:0",
    "/linked/below/sub/b": "644 1500:1600",
    "/there": "755 7:8",
    "/there/sub": "2755 33:44",
    "/there/a": "644 1500:1600",
    "/single": "755 0:0",
    "/single/a": "644 1500:1600",
    "/single/run.sh": "4750 33:44",
    "/glob": "755 0:0",
    "/glob/b": "644 1500:1600",
    "/given": "755 5:6",
    "/given/made": "755 5:6",
    "/given/made/sub": "2755 5:6",
    "/given/made/plain/d": "644 5:6",
    "/numbered": "4750 5:5",
    "/grouped": "4750 0:6",
    "/parents/out/sub/b": "644 1500:1600",
    "/moded": "755 0:0",
    "/moded/deep": "700 1500:1600",
    "/over": "755 7:8",
    "/over/a": "644 0:0",
    "/tree": "755 9:9",
    "/tree/a": "644 9:9",
    "/at": "755 1500:1500",
    "/at/work": "755 1500:1500",
    "/packed": "755 0:0",
    "/packed/dir": "750 1500:1600",
    "/packed/dir/file": "4755 1500:1600",
    "/packed/whole": "600 70000:80000",
    "/packed-of-9": "755 9:9",
    "/packed-of-9/dir/file": "4755 9:9",
}


def packed() -> bytes:
    """Return a tar with a complete name, a folder and a file of users that no image knows, and a device."""
    members = (
        ("./", tarfile.DIRTYPE, 0o700, 3, 3),
        ("dir", tarfile.DIRTYPE, 0o750, 1500, 1600),
        ("dir/file", tarfile.REGTYPE, 0o4755, 1500, 1600),
        ("/whole", tarfile.REGTYPE, 0o600, 70_000, 80_000),
        ("null", tarfile.CHRTYPE, 0o666, 0, 0),
    )
    result = io.BytesIO()
    with tarfile.open(fileobj=result, mode="w") as archive:
        for name, kind, mode, uid, gid in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.uid, member.gid, member.uname = kind, mode, uid, gid, "nobody"
            archive.addfile(member)
    return result.getvalue()


@pytest.mark.usefixtures("sandbox_settings")
def test_copies_keep_owners_of_stages_and_tars(start: Start, run: Run, context: Callable[..., Any]) -> None:
    set_alias(sandbox_config(), "debian:12", "host")
    name = context(DOCKERFILE, **{"tree/a": "x", "packed.tar": packed()})
    built(name)
    sandbox = start(image=name)
    listed = output_of(run, sandbox, f"stat -c '%n %a %u:%g' {' '.join(OWNERS)}").splitlines()
    assert dict(line.split(" ", 1) for line in listed) == OWNERS
    assert output_of(run, sandbox, "cat /mounted; ls /packed; ls /whole 2>/dev/null || true").split() == [
        "1500:1600",
        "dir",
        "whole",
    ]
    # a user's own program sees that the file is its own
    assert output_of(run, start(image=name, user="1500:1600"), "[ -O /new/a ] && ! [ -O /new ] && echo own") == "own\n"
