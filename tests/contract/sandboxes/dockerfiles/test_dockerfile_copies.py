"""COPY and ADD of Dockerfiles as in BuildKit: the expectations of its own integration tests, in real builds."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from farm.errors import ImageError
from farm.settings import settings
from testkit.scratch_folder import sandbox_config
from tests.contract.sandboxes.dockerfiles.test_dockerfiles import built, context, output_of
from tests.services.images import root_folder
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.images.image import set_alias

__all__ = ["context"]

Run = Callable[[Any], Any]
Start = Callable[..., Sandbox]

FILES = (
    *("dir1/file-101.png", "dir1/file-102.txt", "dir1/file-103.jpeg", "dir2/file-201.pdf", "dir2/file-202.jpeg"),
    *("dir2/file-203.png", "dir3/file-301.mp3", "dir3/file-302.mpeg", "dir4/file-401.txt", "homage.txt", "home.md"),
)
EXCLUDED = {
    "--exclude=*/*.png --exclude=*/*.jpeg . /1": "101.png 103.jpeg 202.jpeg 203.png",
    "--exclude=*/*.pdf --exclude=*/*.txt . /2": "102.txt 201.pdf 401.txt",
    "--exclude=*.mp3 dir3/ /3/": "301.mp3",
    "--exclude=*.mp3 --exclude=*.jpeg --exclude=*.png --exclude=*.pdf --exclude=*.txt dir* /4/": (
        "101.png 102.txt 103.jpeg 201.pdf 202.jpeg 203.png 301.mp3 401.txt"
    ),
    '--exclude="*.mp*" --exclude=*.jpeg --exclude=*.png --exclude=*.pdf dir* /5/': (
        "101.png 103.jpeg 201.pdf 202.jpeg 203.png 301.mp3 302.mpeg"
    ),
    "--exclude=* dir* /6/": "101.png 102.txt 103.jpeg 201.pdf 202.jpeg 203.png 301.mp3 302.mpeg 401.txt",
    # the example of the reference
    "--exclude=*.txt hom* /7/": "homage.txt",
    "--exclude=**/*.txt . /8": "102.txt 401.txt homage.txt",
    "--exclude=dir1 --exclude=dir4 . /9/": "101.png 102.txt 103.jpeg 401.txt",
}
ALL = {
    "3": ("301.mp3", "302.mpeg"),
    "7": ("homage.txt", "home.md"),
}
PARENTS = """\
FROM debian:12 AS base
WORKDIR /test
RUN <<eot
	set -ex
	mkdir -p a/b/c/d/e a/b2/c/d/e a/b/c2/d/e a/b/c2/d/e2
	touch a/b/c/d/foo a/b/c/d/e/bay a/b2/c/d/e/bar a/b/c2/d/e/baz a/b/c2/d/e2/baz
eot
FROM debian:12
COPY --from=base --parents /test/a/b/./c/d /1/
RUN [ -d /1/c/d/e ] && [ -f /1/c/d/foo ] && [ ! -d /1/a ] && [ ! -d /1/e ]
COPY --from=base --parents /test/a/b/c/d/. /2/
RUN [ -d /2/test/a/b/c/d/e ] && [ -f /2/test/a/b/c/d/foo ]
COPY --from=base --parents ./test/a/b/c/d /3
RUN [ -d /3/test/a/b/c/d/e ] && [ -f /3/test/a/b/c/d/foo ]
COPY --from=base --parents /test/a/./b/./c /4/
RUN [ -d /4/b/c/d/e ] && [ -f /4/b/c/d/foo ]
COPY --from=base --parents /test/a/./*/c /5/
RUN [ -d /5/b/c/d/e ] && [ -f /5/b2/c/d/e/bar ]
COPY --from=base --parents /test/a/b*/./c/**/e /6/
RUN [ -d /6/c/d/e ] && [ -f /6/c/d/e/bay ] && [ -f /6/c/d/e/bar ]
COPY --from=base --parents /test/a/b/c*/./d/**/baz /test/a/b*/./c/**/bar /7/
RUN [ -f /7/d/e/baz ] && [ ! -f /7/d/e/bay ] && [ -f /7/d/e2/baz ] && [ -f /7/c/d/e/bar ]
COPY --from=base --parents /test/a/b2*/none /test/a/b/./none* /8/
RUN [ ! -e /8/a ]
COPY --parents tree/a/b/./c/d /11/
RUN [ -d /11/c/d/e ] && [ -f /11/c/d/foo ] && [ ! -d /11/a ] && [ ! -d /11/e ]
COPY --parents tree/a/b/c/d/. /12/
RUN [ -d /12/tree/a/b/c/d/e ] && [ -f /12/tree/a/b/c/d/foo ]
COPY --parents ./tree/a/b/c/d /13
RUN [ -d /13/tree/a/b/c/d/e ] && [ -f /13/tree/a/b/c/d/foo ]
COPY --parents tree/a/./*/c /15/
RUN [ -d /15/b/c/d/e ] && [ -f /15/b2/c/d/e/bar ]
COPY --parents tree/a/b*/./c/**/e /16/
RUN [ -d /16/c/d/e ] && [ -f /16/c/d/e/bay ] && [ -f /16/c/d/e/bar ]
COPY --parents tree/a/b/c*/./d/**/baz tree/a/b*/./c/**/bar /17/
RUN [ -f /17/d/e/baz ] && [ ! -f /17/d/e/bay ] && [ -f /17/d/e2/baz ] && [ -f /17/c/d/e/bar ]
COPY --parents tree/a/b2*/none tree/a/b/./none* /18/
WORKDIR /19
COPY --parents tree/a/b/c/d/fo? .
RUN [ -f tree/a/b/c/d/foo ] && [ ! -e tree/a/b/c/d/e ]
"""
MODES = """\
FROM debian:12 AS other
COPY one /one
FROM debian:12
COPY --chmod=u=rwX,go=rX one /1/
COPY --chmod=g+w,o= one/run one/text /2/
COPY --chmod=a-x,u+s one/run /3
COPY --from=other --chmod=u=rwX,go= /one /4/
COPY --chmod=4755 <<EOF /5
x
EOF
RUN stat -c '%a %n' /1 /1/* /2/* /3 /4/* /5 >/modes
"""


@pytest.fixture(scope="module", autouse=True)
def _names(sandbox_settings: None) -> None:
    set_alias(sandbox_config(), "debian:12", "host")


@pytest.fixture
def one(provider: Any) -> None:
    if provider.kind != "namespace":
        pytest.skip("builds are the same for all kinds")


@pytest.mark.usefixtures("one")
@pytest.mark.parametrize("origin", ["context", "stage"])
def test_excluded_files_are_not_copied(origin: str, start: Start, run: Run, context: Callable[..., str]) -> None:
    copies = [f"COPY {rest}\n" for rest in EXCLUDED]
    if origin == "stage":
        copies = [re.sub(r" (\.|dir|hom)", r" /all/\1", each).replace("COPY", "COPY --from=all") for each in copies]
    name = context(
        f"FROM debian:12 AS all\nWORKDIR /all\nCOPY . .\nFROM debian:12\n{''.join(copies)}", **files_of(FILES)
    )
    sandbox = start(image=name)
    for number, excluded in enumerate(EXCLUDED.values(), start=1):
        names = {Path(each).name for each in FILES}
        if number in (3, 7):
            names = {each for each in names if each.removeprefix("file-") in ALL[str(number)]}
        elif number in (4, 5, 6):
            names = {each for each in names if each.startswith("file-")}
        wanted = {each for each in names if each.removeprefix("file-") not in excluded.split()}
        listed = output_of(run, sandbox, f"find /{number} -type f -printf '%f\\n'; true").split()
        assert set(listed) - {"Dockerfile"} == wanted, number


def files_of(names: tuple[str, ...]) -> dict[str, str]:
    return dict.fromkeys(names, "x")


@pytest.mark.usefixtures("one")
def test_copy_parents_keeps_the_folders(context: Callable[..., str]) -> None:
    files = ("a/b/c/d/foo", "a/b/c/d/e/bay", "a/b2/c/d/e/bar", "a/b/c2/d/e/baz", "a/b/c2/d/e2/baz")
    built(context(PARENTS, **files_of(tuple(f"tree/{each}" for each in files))))
    with pytest.raises(ImageError, match=r":2: .*tree/none is not in the context"):
        built(context("FROM debian:12\nCOPY --parents tree/none /x/\n"))
    with pytest.raises(ImageError, match=r":3: .*/etc/none"):
        built(context("FROM debian:12 AS a\nFROM debian:12\nCOPY --parents --from=a /etc/none /x/\n"))


@pytest.mark.usefixtures("one")
def test_symbolic_modes_are_applied(start: Start, run: Run, context: Callable[..., str], tmp_path: Path) -> None:
    name = context(MODES, **{"one/run": "r", "one/text": "t"})
    for each, mode in (("one/run", 0o755), ("one/text", 0o604), ("one", 0o711)):
        (tmp_path / "context" / each).chmod(mode)
    modes = output_of(run, start(image=name), "cat /modes").split("\n")
    assert modes[1:] == [
        *("755 /1/run", "644 /1/text", "770 /2/run", "620 /2/text", "4644 /3", "700 /4/run", "600 /4/text", "4755 /5"),
        "",
    ]
    with pytest.raises(ImageError, match=r":2: .*--chmod=u\+q: it is a mode"):
        built(context("FROM debian:12\nCOPY --chmod=u+q one /x/\n"))


@contextmanager
def served(files: dict[str, bytes]) -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = files.get(self.path.partition("?")[0])
            if self.path == "/moved":
                self.send_response(302)
                self.send_header("Location", "/file.txt")
            else:
                self.send_response(404 if body is None else 200)
                self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, format: str, *args: object) -> None:
            """Write nothing into pytest's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.usefixtures("one")
def test_add_downloads_and_unpacks_urls(
    start: Start, run: Run, context: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("inside"))
    files = {"/file.txt": b"text\n", "/a/b.tar": packed.getvalue()}
    checksum = hashlib.sha256(b"text\n").hexdigest()
    with served(files) as at:
        text = f"""FROM debian:12
ARG AT={at}
ADD $AT/file.txt /1/
ADD --checksum=sha256:{checksum} --chmod=644 $AT/file.txt?x=1 /2
ADD $AT/a/b.tar $AT/moved /3/
ADD --unpack $AT/a/b.tar /4/
ADD --unpack=false local.tar /5/
RUN cd / && stat -c '%a %s %Y %n' 1/* 2 3/* 4/* 5/* >/listed
"""
        name = context(text, **{"local.tar": packed.getvalue()})
        with pytest.raises(ImageError, match=r":3: .*builds have no network: allow it by FARM_BUILD_NETWORK=1"):
            built(name)
        monkeypatch.setenv("FARM_BUILD_NETWORK", "1")
        settings.cache_clear()
        try:
            listed = output_of(run, start(image=_again(name)), "cat /listed")
            size = len(packed.getvalue())
            assert listed == (
                f"600 5 1445412480 1/file.txt\n644 5 1445412480 2\n600 {size} 1445412480 3/b.tar\n"
                f"600 5 1445412480 3/moved\n644 0 0 4/inside\n644 {size} {listed.split()[-2]} 5/local.tar\n"
            )
            for flags, why in (
                (f"--checksum=sha256:{'0' * 64} {at}/file.txt", f"has the checksum sha256:{checksum}"),
                (f"{at}/none", "answered 404"),
                ("--checksum=md5:1 " + at, "it must be sha256: and"),
                ("--checksum=sha256:1 Dockerfile", "needs a source with a URL"),
                ("https://example.org/a/b.git", "ADD of a git repository is not supported"),
            ):
                with pytest.raises(ImageError, match=f"(?s):2: .*{why}"):
                    built(context(f"FROM debian:12\nADD {flags} /x\n"))
        finally:
            monkeypatch.undo()
            settings.cache_clear()


def _again(name: str) -> str:
    """Build an image that has just failed, as by hand."""
    built(name, retry=True)
    return name


@pytest.mark.usefixtures("one")
def test_copy_from_an_alias_works(start: Start, run: Run, context: Callable[..., str], open_folder: Path) -> None:
    base = root_folder(open_folder / "copied-from")
    set_alias(sandbox_config(), "ghcr.io/astral-sh/uv:0.5", str(base))
    text = """ARG TAG=0.5
FROM ghcr.io/astral-sh/uv:$TAG AS uv
FROM debian:12
COPY --from=ghcr.io/astral-sh/uv:0.5 /etc/mark /etc/ma* /1/
COPY --from=uv /etc/mark /2
"""
    name = context(text)
    assert output_of(run, start(image=name), "cat /1/mark /2") == "small image\n" * 2
    with pytest.raises(ImageError, match=r":2: .*no image of this farm is called absent:1: add one by `farm images"):
        built(context("FROM debian:12\nCOPY --from=absent:1 /a /b\n"))
