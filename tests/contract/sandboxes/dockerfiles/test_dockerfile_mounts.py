"""Mounts of RUN, and ONBUILD, in real builds: what a program sees, and what is in no layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farm.errors import ImageError
from testkit.scratch_folder import sandbox_config
from tests.contract.sandboxes.dockerfiles.test_dockerfiles import built, context, output_of
from tests.services.images import PROGRAMS, root_folder
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.images.image import set_alias

__all__ = ["context"]

Run = Callable[[Any], Any]
Start = Callable[..., Sandbox]

MOUNTS = """\
FROM small:1 AS build
RUN mkdir -p /out/deep && echo foo >/out/foo && echo d >/out/deep/d && echo tool >/tool
FROM small:1
ENV AT=/by-variable
WORKDIR /w
RUN echo own >own && mkdir /w/kept && echo k >/w/kept/k && mkdir /real && ln -s /real /link && echo f >/file
RUN --mount=target=/context cat /context/testfile /context/sub/x >/seen && echo w >/context/new
RUN --mount=type=bind,source=testfile,target=testfile --mount=type=bind,src=sub,dst=kept,rw \\
    cat testfile kept/x >>/seen && ls kept >>/seen && touch kept/new
RUN --mount=type=bind,target=. ls >>/seen
RUN --mount=type=bind,from=build,src=out,target=/out,rw touch /out/bar && cat /out/foo /out/deep/d >>/seen
RUN --mount=from=build,source=/tool,target=/usr/bin/tool --mount=from=small:1,source=/etc/mark,target=/file \\
    cat /usr/bin/tool /file >>/seen
RUN --mount=type=tmpfs,target=/mytmp,size=1m --mount=type=tmpfs,target=/w/kept \\
    touch /mytmp/foo kept/foo && ls /mytmp kept >>/seen
RUN --mount=target=$AT/a/b --mount="type=bind,source=testfile,target=/link/t" \\
    cat $AT/a/b/testfile /real/t >>/seen; echo stays >/real/stays
RUN --mount=type=cache,target=/cache,uid=5 --mount=type=secret,id=token,target=/run/token,env=TOKEN \\
    --mount=type=ssh touch /cache/x && [ ! -e /run/token ] && echo "${TOKEN-none}" >>/seen
RUN --network=host --security=sandbox true
"""
SEEN = """\
contents
x
contents
x
x
Dockerfile
sub
testfile
foo
d
tool
small image
/mytmp:
foo

kept:
foo
contents
contents
none
"""


@pytest.fixture(scope="module", autouse=True)
def _names(sandbox_settings: None, open_folder: Path) -> None:
    programs = [*PROGRAMS, "ln", "find"]
    set_alias(sandbox_config(), "small:1", str(root_folder(open_folder / "small", programs)))


@pytest.fixture
def one(provider: Any) -> None:
    if provider.kind != "namespace":
        pytest.skip("builds are the same for all kinds")


@pytest.mark.usefixtures("one")
def test_run_mounts_are_visible_only_during_the_step(start: Start, run: Run, context: Callable[..., str]) -> None:
    name = context(MOUNTS, **{"testfile": "contents\n", "sub/x": "x\n", "left/out": "", ".dockerignore": "left\n.d*"})
    sandbox = start(image=name, workdir="")
    assert output_of(run, sandbox, "cat /seen") == SEEN
    # nothing that was mounted, but everything that it hid
    places = "/w /real /link /file /context /out /mytmp /by-variable /cache /usr/bin/tool"
    listed = output_of(
        run, sandbox, f"for each in {places}; do [ -e $each ] || echo no $each; done; find {places} 2>&-; :"
    )
    assert set(listed.splitlines()) == {
        *("no /context", "no /out", "no /mytmp", "no /by-variable", "no /usr/bin/tool"),
        *("/w", "/w/own", "/w/kept", "/w/kept/k", "/real", "/real/stays", "/link", "/file", "/cache", "/cache/x"),
    }
    assert output_of(run, sandbox, "cat /file own kept/k") == "f\nown\nk\n"
    notes = built(name).config.notes
    assert sum("type=secret is ignored" in note or "type=ssh is ignored" in note for note in notes) == 2


@pytest.mark.usefixtures("one")
def test_mount_is_part_of_the_layer_key(context: Callable[..., str]) -> None:
    text = "FROM small:1\nRUN --mount=target=/c,source=a cat /c >/seen\n"
    first = built(context(text, a="1", b="1"))
    assert built(context(text, a="1", b="2")).layers == first.layers
    assert built(context(text, a="2", b="2")).layers != first.layers


@pytest.mark.usefixtures("one")
def test_symlink_made_by_a_program_is_not_followed(context: Callable[..., str], tmp_path: Path) -> None:
    """Only files of the layer are extracted from it."""
    (tmp_path / "host").mkdir()
    (tmp_path / "host/t").write_text("the node's")
    text = f"FROM small:1\nRUN --mount=target=/a/t,source=f rm -rf /a; ln -s {tmp_path}/host /a\n"
    built(context(text, f="f"))
    assert (tmp_path / "host/t").read_text() == "the node's"


REFUSED = {
    "RUN --mount=target=/x,source=none true": "none is not in the context",
    "RUN --mount=type=secret,id=a,required=true true": "type=secret is required, and builds have no secrets",
    "RUN --mount=type=ssh,required true": "type=ssh is required",
    "RUN --mount=typ=tmpfs true": "typ is not an option of a mount",
    "RUN --mount=type=tmp,target=/x true": "--mount=type=tmp is not supported",
    "RUN --mount=target=/ true": "--mount cannot be at /",
    "RUN --mount=type=tmpfs true": "it has no target",
    "RUN --mount=from=none:1,target=/x true": "no image of this farm is called none:1",
    "RUN --mount=from=small:1,source=/none,target=/x true": "/none",
    "RUN --mount=target=/etc,source=f true": "/etc is a folder, and its source is a file",
    "ONBUILD FROM small:1": "ONBUILD takes one instruction",
    "ONBUILD ONBUILD RUN x": "ONBUILD takes one instruction",
}


@pytest.mark.usefixtures("one")
@pytest.mark.parametrize("text", REFUSED)
def test_invalid_mounts_are_refused(text: str, context: Callable[..., str]) -> None:
    with pytest.raises(ImageError, match=rf"Dockerfile:2: .*{REFUSED[text]}"):
        built(context(f"FROM small:1\n{text}\n", f=""))


@pytest.mark.usefixtures("one")
def test_onbuild_triggers_run_in_child_images(
    start: Start, run: Run, context: Callable[..., str], open_folder: Path
) -> None:
    base = """\
FROM small:1 AS src
RUN echo s >/s
FROM small:1 AS base
ONBUILD ARG WHO=them
ONBUILD COPY --from=src /s /w/
ONBUILD COPY f /w/
ONBUILD RUN echo "11 $WHO" >>/out
FROM base AS mid
RUN echo mid >>/out
FROM mid
RUN echo last >>/out
"""
    assert output_of(run, start(image=context(base, f="f")), "cat /out /w/s; ls /w") == "11 them\nmid\nlast\ns\nf\ns\n"
    # of an image that was built before, not of concurrent ones
    first = context("FROM small:1\nONBUILD RUN echo triggered >>/out\nRUN echo first >/out\n")
    kept = open_folder / "first"
    Path(first.removeprefix("dockerfile:")).rename(kept)
    set_alias(sandbox_config(), "first:1", f"dockerfile:{kept}")
    assert output_of(run, start(image=f"dockerfile:{kept}"), "cat /out") == "first\n"
    twice = "FROM first:1 AS a\nRUN echo a >>/out\nFROM a\nRUN echo b >>/out\n"
    assert output_of(run, start(image=context(twice)), "cat /out") == "first\ntriggered\na\nb\n"
