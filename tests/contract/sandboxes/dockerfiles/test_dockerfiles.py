"""Images of Dockerfiles, built and used in sandboxes: with the node's own system as their base, offline."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from farm.errors import ImageError, SandboxError
from farm.settings import settings
from testkit.scratch_folder import sandbox_config
from tests.contract.sandboxes.sandbox_kinds import python
from tests.services.farms import until
from tests.services.images import PROGRAMS, root_folder
from tests.services.servers.registry import registry
from workers.plugins.interfaces import Sandbox, SandboxProvider
from workers.sandboxes.images.dockerfile.image_config import Healthcheck
from workers.sandboxes.images.image import Image, fallback_note, image, set_alias
from workers.sandboxes.images.image_cache import entries
from workers.sandboxes.images.image_pruning import IN_USE, PART, examined
from workers.sandboxes.launch_plan import start_build

Run = Callable[[Any], Any]
Start = Callable[..., Sandbox]

STAGES_AND_USERS = """\
ARG RELEASE=bookworm-slim
FROM debian:${RELEASE} AS build
ARG VERSION=2
ENV PART="two words" \\
    OTHER=x
WORKDIR /src
COPY tool/ .
RUN <<EOF
set -e
mkdir -p /out
sed "s/@VERSION@/${VERSION}/; s/@PART@/${PART}/" greet.in > /out/greet
echo "$VERSION" > /out/VERSION
ln -s /out/greet /out/link
chmod 755 /out/greet
EOF

FROM debian:${RELEASE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN useradd --create-home --uid 1500 agent
COPY --from=build /out/ /opt/tool/
COPY --chown=agent:agent ["tool/read me.txt", "/home/agent/"]
RUN ["touch", "/opt/exec-form"]
ENV PATH=/opt/tool:$PATH
LABEL farm.sample="yes"
EXPOSE 8080
VOLUME /scratch
USER agent
WORKDIR /home/agent/work
RUN id -un >who; id -u >>who; echo ~ >>who; [ -O /home/agent ] && touch mine
HEALTHCHECK --interval=5s CMD test -s /opt/tool/VERSION
ENTRYPOINT ["/bin/bash"]
CMD ["-l"]
"""

USERS_OF_ROOT = """\
FROM debian:12
ADD packed.tgz /opt/packed/
COPY one/ /etc/
COPY --chmod=750 one/a /made/there/
RUN chown 33:33 /etc/a && chroot --userspec=33:33 / touch /su
RUN rm -r /opt/packed/gone && grep -c : /proc/net/dev >/interfaces; mkdir -p /opt/deep/er
"""

SLEEPS = "FROM debian:12\nRUN echo of-killed >/first\nRUN echo {0} >/second; sleep {0}\n"


@pytest.fixture(scope="module", autouse=True)
def _names(sandbox_settings: None) -> None:
    for name in ("debian:bookworm-slim", "debian:12"):
        set_alias(sandbox_config(), name, "host")


@pytest.fixture
def context(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes a context and returns the name of its image."""

    def write(dockerfile: str, **files: str | bytes) -> str:
        for name, content in {"Dockerfile": dockerfile, **files}.items():
            path = tmp_path / "context" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return f"dockerfile:{tmp_path / 'context'}"

    return write


def built(name: str, *, fallback: str = "", retry: bool = False, **values: str) -> Image:
    config = sandbox_config()
    return image(config, name, values, fallback=fallback, retry=retry, start=partial(start_build, config))


def output_of(run: Run, sandbox: Sandbox, script: str) -> str:
    result = run(sandbox.exec(["bash", "-c", script], timeout_s=20))
    assert result.stderr == b""
    return str(result.stdout.decode())


def test_stages_and_users_are_applied(start: Start, run: Run, context: Callable[..., str]) -> None:
    files = {
        "tool/greet.in": "#!/bin/sh\necho @PART@ @VERSION@\n",
        "tool/read me.txt": "text\n",
        ".dockerignore": "*.md",
    }
    name = context(STAGES_AND_USERS, **files, **{"tool/not.md": ""})
    sandbox = start(image=name, workdir="", fake_root=True)
    assert output_of(run, sandbox, "pwd; ls; greet; cat who; ls /opt/tool /home/agent /src 2>&1") == (
        "/home/agent/work\nmine\nwho\ntwo words 2\nagent\n1500\n/home/agent\n"
        "ls: cannot access '/src': No such file or directory\n/home/agent:\nread me.txt\nwork\n\n"
        "/opt/tool:\nVERSION\ngreet\nlink\n"
    )
    assert (
        output_of(run, sandbox, "rm -r /opt/tool/VERSION; readlink /opt/tool/link; env | grep -c ^PART=")
        == "/out/greet\n0\n"
    )
    config = built(name).config
    assert (config.user, config.workdir, config.entrypoint) == ("agent", "/home/agent/work", ["/bin/bash"])
    assert config.healthcheck == Healthcheck("test -s /opt/tool/VERSION", interval_s=5.0)
    other = built(name, VERSION="3")
    assert (len(other.layers), other.layers[-1]) == (6, built(name).layers[-1])


def test_image_from_scratch_has_all_files_of_a_stage(start: Start, run: Run, context: Callable[..., str]) -> None:
    text = "FROM debian:12 AS build\nENV A=1\nWORKDIR /made\nUSER 1500\nRUN touch mine\n"
    text += 'FROM scratch\nCOPY --from=build / /\nRUN echo "A is $A" > /made/said\n'
    sandbox = start(image=context(text), workdir="", fake_root=True)
    assert (
        output_of(run, sandbox, "pwd; id -u; cat /made/said; stat -c %u /made/mine") == "/workspace\n0\nA is \n1500\n"
    )


def test_files_are_copied_into_an_image_from_scratch(
    start: Start, run: Run, context: Callable[..., str], tmp_path: Path
) -> None:
    text = """
        FROM debian:12 AS build
        RUN mkdir /made && echo made > /made/file
        FROM scratch AS parts
        COPY own/ /parts/own/
        WORKDIR /parts/empty
        COPY --from=build /made/file ../made
        FROM scratch
        ADD system.tar.gz /
        COPY --from=parts /parts /put/parts
        COPY --from=parts /parts/made /put/
        RUN echo ran > /put/ran
        WORKDIR /put
    """
    system = io.BytesIO()
    with tarfile.open(fileobj=system, mode="w:gz") as archive:
        archive.add(root_folder(tmp_path / "system", [*PROGRAMS, "find", "sort", "stat"]), ".")
    files: dict[str, str | bytes] = {"system.tar.gz": system.getvalue(), "own/f": "of the context\n"}
    name = context(text, **files)
    sandbox = start(image=name, workdir="", fake_root=True)
    # a step's layer has the files of the step, but no mount points
    tops = {entry.name for layer in built(name).layers[:-1] for entry in layer.iterdir()}
    assert tops.isdisjoint({"dev", "proc", "sys", "run", "tmp"})
    found = "parts parts/empty parts/made parts/own parts/own/f made ran"
    assert output_of(run, sandbox, "pwd; cd /put; find * | sort").split() == ["/put", *sorted(found.split())]
    assert output_of(run, sandbox, "cat made parts/own/f ran").split() == ["made", "of", "the", "context", "ran"]


@pytest.mark.parametrize(
    ("rest", "says"),
    [
        ("COPY f /", "has no bash"),
        ("COPY f /\nRUN true", "RUN true: exit code 127"),
        ("COPY f /\nFROM debian:12\nCOPY --from=0 /g /", "there is no /g in what it copies from"),
        ("COPY f /\nFROM debian:12\nCOPY --from=0 /* /", "a pattern needs a shell in the stage"),
        ("COPY f /\nFROM debian:12\nCOPY --from=0 --exclude=f / /", "need a shell in the stage"),
    ],
)
def test_step_that_needs_a_shell_is_refused_without_one(context: Callable[..., str], rest: str, says: str) -> None:
    with pytest.raises(ImageError, match=re.escape(says)):
        built(context(f"FROM scratch\n{rest}\n", f="f"))


def test_files_of_all_kinds_are_copied(start: Start, run: Run, context: Callable[..., str]) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for each in ("kept/f", "gone/f"):
            archive.addfile(tarfile.TarInfo(each))
    name = context(USERS_OF_ROOT, **{"packed.tgz": packed.getvalue(), "one/a": "a", "one/b/c": "c"})
    sandbox = start(image=name)
    listed = (
        "find /opt/packed /made /etc/a /etc/b /su | sort; stat -c %a /made/there/a; cat /interfaces; ls -d /etc/ssl"
    )
    assert output_of(run, sandbox, listed) == (
        "/etc/a\n/etc/b\n/etc/b/c\n/made\n/made/there\n/made/there/a\n/opt/packed\n/opt/packed/kept\n/opt/packed/kept/f\n"
        "/su\n750\n1\n/etc/ssl\n"
    )


@pytest.fixture
def _one_kind(provider: SandboxProvider) -> None:
    if provider.kind != "namespace":
        pytest.skip("builds are the same for all kinds")


@pytest.mark.usefixtures("_one_kind")
def test_failed_build_names_its_cause_and_leaves_nothing(context: Callable[..., str]) -> None:
    config = sandbox_config()
    before = {path.name for path in config.images_folder.iterdir()}
    name = context("FROM debian:12\n\nRUN echo out; echo more >&2; exit 3\nRUN never")
    with pytest.raises(ImageError, match=r"Dockerfile:3: RUN echo out; .*: exit code 3: out \| more") as error:
        built(name)
    assert not error.value.retryable
    with pytest.raises(ImageError, match="exit code 3"):
        built(name)
    with pytest.raises(ImageError, match=r"Dockerfile:1: FROM ubuntu:1: no image .* `farm images alias ubuntu:1 PATH`"):
        built(context("FROM ubuntu:1"))
    with pytest.raises(
        ImageError, match=r"Dockerfile:2: USER other: the image has no user|RUN id: the image has no user"
    ):
        built(context("FROM debian:12\nUSER other\nRUN id"))
    with pytest.raises(ImageError, match=r"exit code \d+; builds have no network: allow it by FARM_BUILD_NETWORK=1"):
        built(context("FROM debian:12\nRUN getent hosts example.org || { echo could not resolve it; exit 2; }"))
    left = {path.name for path in config.images_folder.iterdir()} - before
    assert {Path(each).suffix for each in left} <= {".lock", ".failed"}
    assert not [path for path in config.sandboxes_folder.iterdir() if path.name.startswith("build-")]


@pytest.mark.usefixtures("_one_kind")
def test_killed_build_is_resumed_from_its_finished_layers(context: Callable[..., str], tmp_path: Path) -> None:
    name = context(SLEEPS.format(4711))
    code = f"from tests.contract.sandboxes.dockerfiles.test_dockerfiles import built; built({name!r})"
    builders = [python(code, FARM_BUILD_ENV="{}") for _ in range(2)]
    second = "RUN echo 4711"
    until(
        lambda: any(_is_running(state) for state in _builds()) and _layer("RUN echo of-killed") is not None,
        "the second layer is built",
    )
    for builder in builders:
        builder.send_signal(signal.SIGKILL)
        builder.wait()
        for pipe in (builder.stdin, builder.stdout):
            assert pipe
            pipe.close()
    until(lambda: not _builds(), "what was killed is gone")
    assert _layer(second) is None
    first = _layer("RUN echo of-killed")
    again = built(context(SLEEPS.format(0)))
    assert again.layers[-1] == first
    assert (again.layers[0] / "second").read_text() == "0\n"


def _builds() -> list[Path]:
    return list(sandbox_config().sandboxes_folder.glob("build-*"))


def _is_running(state: Path) -> bool:
    return (state / "upper/second").exists()


def _layer(label: str) -> Path | None:
    for entry in entries(sandbox_config()):
        if any(label in name for name in entry.names):
            return entry.folder / "root"
    return None


@pytest.mark.usefixtures("_one_kind")
def test_concurrent_builds_build_once(context: Callable[..., str], tmp_path: Path) -> None:
    name = context("FROM debian:12\nRUN cat /proc/sys/kernel/random/uuid >/drawn\nRUN true\n")
    code = "from tests.contract.sandboxes.dockerfiles.test_dockerfiles import built; "
    code += f"print((built({name!r}).layers[1] / 'drawn').read_text(), end='')"
    builders = [python(code) for _ in range(3)]
    drawn = {builder.communicate()[0] for builder in builders}
    assert len(drawn) == 1
    assert len(drawn.pop()) == 37


@pytest.mark.usefixtures("_one_kind")
def test_parts_of_a_used_image_are_kept(start: Start, run: Run, context: Callable[..., str]) -> None:
    config = sandbox_config()
    name = context("FROM debian:12\nRUN echo kept >/kept\n")
    sandbox = start(image=name)
    wanted = built(name)
    key = wanted.key(config)
    own = [entry for entry in entries(config) if entry.folder.name in (key, wanted.layers[0].parent.name)]
    for entry in own:
        for mark in (entry.folder / "used").iterdir():
            os.utime(mark, (1, 1))
    reasons = {each.entry.folder.name: each.kept for each in examined(config, entries_now(own))}
    assert reasons == {key: IN_USE, wanted.layers[0].parent.name: PART}
    run(sandbox.stop())
    assert {each.kept for each in examined(config, entries_now(own))} == {""}
    assert image(config, f"cached:{key}").layers == wanted.layers


def entries_now(own: list[Any]) -> list[Any]:
    folders = {entry.folder for entry in own}
    return [entry for entry in entries(sandbox_config()) if entry.folder in folders]


@pytest.mark.usefixtures("_one_kind", "apptainer")
def test_buildah_builds_where_it_is_installed(
    start: Start, run: Run, context: Callable[..., str], open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("buildah") is None or os.geteuid() != 0:
        pytest.skip("no buildah on PATH, or not root, without which its builds have network")
    set_alias(sandbox_config(), "small:1", str(root_folder(open_folder / "buildah-base")))
    monkeypatch.setenv("FARM_IMAGE_BUILDER", "buildah")
    monkeypatch.setenv("FARM_BUILD_ENV", '{"ftp_proxy": "http://a:hunter22@b"}')
    settings.cache_clear()
    steps = "test ${#ftp_proxy} = 19 && ! cat /proc/[0-9]*/cmdline 2>/dev/null | grep -q hunter[2]2"
    lines = f"FROM small:1\nENV WORD=made\nRUN {steps} && echo $WORD >/etc/made\nWORKDIR /opt/here\nUSER 5"
    name = context(lines, made="")
    sandbox = start(image=name, workdir="")
    assert output_of(run, sandbox, "echo -n $ftp_proxy") == ""
    assert output_of(run, sandbox, "cat /etc/made /etc/mark; pwd; echo $WORD") == "made\nsmall image\n/opt/here\nmade\n"
    assert built(name).config.user == "5"
    monkeypatch.setenv("FARM_BUILD_ENV", '{"MIRROR": "http://a:hunter22@b"}')
    settings.cache_clear()
    with pytest.raises(SandboxError, match="FARM_BUILD_ENV has MIRROR"):
        start(image=context("FROM small:1\nRUN true"), workdir="")
    monkeypatch.undo()
    settings.cache_clear()


def test_dockerfile_is_built_when_its_image_cannot_be_pulled(
    start: Start, run: Run, context: Callable[..., str], apptainer: Path
) -> None:
    config = sandbox_config()
    built_of = context("FROM debian:12\nRUN echo built >/which\n")
    with registry(root_folder(Path(built_of.removeprefix("dockerfile:")).with_name("base"))) as (names, content):
        content.status = 500
        name = f"{names}/team/tool:1"
        sandbox = start(image=name, fallback_image=built_of)
        assert output_of(run, sandbox, "cat /which") == "built\n"
        chosen = built(name, fallback=built_of)
        assert name in chosen.config.notes[0]
        assert "its Dockerfile was built instead" in chosen.config.notes[0]
        assert fallback_note(config, name, built_of) == chosen.config.notes[0]
        content.status = 0
        n_requests = len(content.requested_paths)
        # a rollout that ran in it is scored in it
        assert built(name, fallback=built_of).lower == chosen.lower
        assert len(content.requested_paths) == n_requests
        pulled = built(name, retry=True)
        assert (pulled.lower != chosen.lower, fallback_note(config, name, built_of)) == (True, "")
        assert built(name, fallback=built_of).lower == pulled.lower
        content.status = 500
        other = context("FROM debian:12\nRUN exit 3\n")
        with pytest.raises(ImageError, match=r"(?s)could not be built; .*nor could its Dockerfile .*:2: RUN exit 3"):
            start(image=f"{names}/team/other:1", fallback_image=other)
