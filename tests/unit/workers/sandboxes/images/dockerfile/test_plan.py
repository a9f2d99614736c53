"""Build plans: the steps of instructions, the layers that a change rebuilds, and refusals by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.errors import ImageError
from testkit.scratch_folder import sandbox_config
from workers.sandboxes.images.dockerfile.build_stages import staged
from workers.sandboxes.images.dockerfile.context import BuildContext
from workers.sandboxes.images.dockerfile.image_config import Healthcheck, ImageConfig, healthcheck_of
from workers.sandboxes.images.dockerfile.instructions import Instruction, parse
from workers.sandboxes.images.dockerfile.plan import SEARCH_PATH, PlannedStage, check_values, plan
from workers.sandboxes.images.dockerfile.steps import CopyFiles, FromContext, MakeFolder, RunProgram
from workers.sandboxes.images.layered_image import Image

BASE = Image(Path("/base"), variables={"PATH": "/bin", "FROM_BASE": "1"}, entry=Path("/cache/base-key/root"))


def planned(text: str, folder: Path, target: str = "", **values: str) -> list[PlannedStage]:
    file = staged(parse(text), values)
    stage = file.stage(target) if target else file.stages[-1]
    assert stage
    return plan(sandbox_config(), file, stage, BuildContext.of(folder, folder / "Dockerfile"), values, _base, owner=1)


def _base(name: str, instruction: Instruction) -> Image:
    if name != "base:1":
        raise instruction.refused(f"no image {name}")
    return BASE


def keys(text: str, folder: Path, **values: str) -> list[str]:
    return [step.key for stage in planned(text, folder, **values) for step in stage.steps]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.txt", "b.txt", "tool/x y"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_variables_of_build_and_image_are_expanded(folder: Path) -> None:
    text = """
        ARG TAG=1
        FROM base:$TAG
        ARG TAG
        ARG WHO=us MORE
        ENV A=1 B="x $WHO"
        ENV LEGACY  all of $A
        RUN env
        ENV A=2
        WORKDIR sub
        WORKDIR ../other
        RUN ["prog", "$A"]
    """
    [stage] = planned(text, folder)
    first, _, _, last = [step.work for step in stage.steps]
    assert isinstance(first, RunProgram)
    assert first.argv == ("/bin/sh", "-c", "env")
    assert first.env == {
        **{"PATH": "/bin", "FROM_BASE": "1", "TAG": "1", "WHO": "us"},
        **{"A": "1", "B": "x us", "LEGACY": "all of 1"},
    }
    assert isinstance(last, RunProgram)
    assert (last.argv, last.workdir, last.env["A"]) == (("prog", "$A"), "/other", "2")
    assert stage.config.env == {"PATH": "/bin", "FROM_BASE": "1", "A": "2", "B": "x us", "LEGACY": "all of 1"}


def test_program_settings_of_an_image(folder: Path) -> None:
    text = """
        FROM base:1
        SHELL ["/bin/bash", "-ec"]
        LABEL a=1 "b c"="d e"
        EXPOSE 80 443/udp
        VOLUME ["/data"]
        STOPSIGNAL SIGINT
        CMD ["-l"]
        ENTRYPOINT exec prog
        HEALTHCHECK --interval=1m30s --timeout=500ms --retries=2 CMD ["test", "-e", "/x"]
        USER agent:staff
        WORKDIR /home/agent
        RUN --mount=type=cache,target=/c true
    """
    [stage] = planned(text, folder)
    config = stage.config
    assert (config.user, config.workdir, config.shell) == ("agent:staff", "/home/agent", ("/bin/bash", "-ec"))
    assert (config.labels, config.exposed, config.volumes) == ({"a": "1", "b c": "d e"}, ("80", "443/udp"), ("/data",))
    assert (config.command, config.entrypoint, config.stop_signal) == (["-l"], "exec prog", "SIGINT")
    assert config.healthcheck == Healthcheck(["test", "-e", "/x"], 90.0, 0.5, retries=2)
    assert [type(step.work) for step in stage.steps] == [MakeFolder, RunProgram]
    assert stage.steps[0].work == MakeFolder("/home/agent", "agent:staff")
    assert "owners of files are noted" in config.notes[0]
    assert "type=cache is a folder of the image" in config.notes[1]
    assert healthcheck_of(parse("HEALTHCHECK NONE")[0]) is None
    assert ImageConfig.of({"healthcheck": None, "env": {"A": "1"}}) == ImageConfig(env={"A": "1"}, shell=())


def test_run_scripts(folder: Path) -> None:
    text = "FROM base:1\nRUN <<EOF\na\nEOF\nRUN <<E\n#!/usr/bin/env -S x\nb\nE\nRUN cat <<X >f\nc\nX\n"
    script, other, shell = [step.work for step in planned(text, folder)[0].steps]
    assert isinstance(script, RunProgram)
    assert isinstance(other, RunProgram)
    assert isinstance(shell, RunProgram)
    assert script.argv == ("/bin/sh", "-c", "a\n")
    assert (other.argv, other.stdin) == (("/usr/bin/env", "-S", "x", "/dev/stdin"), "#!/usr/bin/env -S x\nb\n")
    assert shell.argv[2] == "cat <<X >f\nc\nX\n"


def test_copy_steps(folder: Path) -> None:
    text = """FROM base:1
WORKDIR /w
COPY --chown=1:2 --chmod=640 *.txt ./
COPY ["tool/x y", "z"]
ADD tool .
COPY <<EOF /etc/made
v=$FROM_BASE
EOF
"""
    stage = planned(text, folder)[0]
    several, one, unpacked, text_file = [step.work for step in stage.steps[1:] if isinstance(step.work, CopyFiles)]
    assert (several.target, several.into, several.chown, several.mode, len(several.sources)) == (
        "/w",
        True,
        "1:2",
        0o640,
        2,
    )
    assert (one.target, one.into, unpacked.unpack) == ("/w/z", False, True)
    assert text_file.sources[0] == type(text_file.sources[0])("EOF", "v=1\n")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        ("a.txt lock*", ["a.txt"]),
        ("lock* a.txt", ["a.txt"]),
        ("a.tx? b.t[x]t", ["a.txt", "b.txt"]),
        ("*.lock tool/?", []),
        ("none/*", []),
    ],
)
def test_pattern_may_match_nothing(folder: Path, sources: str, names: list[str]) -> None:
    """As in BuildKit, for files that may be missing; a name without a pattern must exist."""
    steps = planned(f"FROM base:1\nCOPY {sources} ./\nRUN x\n", folder)[0].steps
    copies = [step.work for step in steps if isinstance(step.work, CopyFiles)]
    found = [source.name for work in copies for source in work.sources if isinstance(source, FromContext)]
    assert (found, len(copies), len(steps)) == (names, bool(names), bool(names) + 1)


def test_only_steps_that_depend_on_a_change_are_rebuilt(folder: Path) -> None:
    text = "FROM base:1\nARG V=1\nRUN one\nCOPY a.txt /a\nRUN two\nLABEL x=1\nCOPY b.txt /b\n"
    before = keys(text, folder)
    assert keys(text.replace("LABEL x=1", "LABEL x=2\n# more"), folder) == before
    (folder / "b.txt").write_text("changed")
    assert [a == b for a, b in zip(before, keys(text, folder), strict=True)] == [True, True, True, False]
    assert [a == b for a, b in zip(before, keys(text, folder, V="2"), strict=True)] == [False] * 4


def test_stages_are_planned(folder: Path) -> None:
    text = (
        "FROM base:1 AS a\nRUN a\nFROM base:1 AS unused\nRUN u\nFROM a AS b\nRUN b\nFROM base:1\nCOPY --from=b /x /y\n"
    )
    stages = planned(text, folder)
    assert [(each.stage.name, each.parent, len(each.steps)) for each in stages] == [
        ("a", None, 1),
        ("b", 0, 1),
        ("", None, 1),
    ]
    assert [each.stage.name for each in planned(text, folder, "a")] == ["a"]


REFUSED = {
    "RUN x": "Dockerfile:1: RUN x: a Dockerfile begins with FROM",
    "FROM other": "Dockerfile:1: FROM other: no image other",
    "FROM base:1\nONBUILD FROM x": "Dockerfile:2: ONBUILD FROM x: ONBUILD takes one instruction",
    "FROM base:1\nCOPY https://x/y /z": "Dockerfile:2: COPY https://x/y /z: COPY does not take a URL",
    "FROM base:1\nADD --from=a /x /z": "Dockerfile:2: ADD /x /z: --from is not supported",
    "FROM base:1\nADD git@x:y.git /z": "Dockerfile:2: ADD git@x:y.git /z: ADD of a git repository",
    "FROM base:1\nCOPY --from=img /a /b": "Dockerfile:2: COPY /a /b: no image img",
    "FROM base:1\nCOPY gone /b": "Dockerfile:2: COPY gone /b: gone is not in the context",
    "FROM base:1\nCOPY a.txt b.txt /b": "Dockerfile:2: COPY a.txt b.txt /b: several sources go into a folder",
    "FROM base:1\nCOPY --link=maybe --parents=x a.txt /b": "Dockerfile:2: COPY a.txt /b: --parents=x: it must be true",
    "FROM base:1\nCOPY --chmod=u+y a.txt /b": "Dockerfile:2: COPY a.txt /b: --chmod=u+y",
    "FROM base:1\nRUN --mount=type=secret,id=a,required x": "Dockerfile:2: RUN x: --mount=type=secret is required",
    "FROM base:1\nRUN --security=insecure x": "Dockerfile:2: RUN x: --security=insecure",
    "FROM --platform=linux/s390x base:1": "Dockerfile:1: FROM base:1: its platform is linux/s390x",
    "FROM base:1\nENV": "Dockerfile:2: ENV: it needs arguments",
    "FROM base:1\nENV A": "Dockerfile:2: ENV A: the form is ENV NAME=VALUE",
    "FROM base:1\nSHELL bash": "Dockerfile:2: SHELL bash: it must be a JSON list",
    "FROM base:1\nHEALTHCHECK --interval=5 CMD x": "Dockerfile:2: HEALTHCHECK CMD x: '5' is not a time",
    "FROM base:1\nCOPY --from=b /a /b\nFROM base:1 AS b": "Dockerfile:2: COPY /a /b: the stage b does not come before",
    "FROM base:1\nRUN a\nENV A=${B:?must be set}": "Dockerfile:3: ENV A=${B:?must be set}: B: must be set",
    "FROM ${IMAGE}": "Dockerfile:1: FROM ${IMAGE}: the name of its image is empty",
}


@pytest.mark.parametrize("text", REFUSED)
def test_unsupported_instructions_are_refused_by_name_and_line(folder: Path, text: str) -> None:
    with pytest.raises(ImageError) as error:
        # otherwise a later stage would not be needed
        planned(text, folder, "0") if "AS b" in text else planned(text, folder)
    assert str(error.value).startswith(REFUSED[text])


def test_undeclared_build_arguments_are_refused() -> None:
    file = staged(parse("ARG A\nFROM base:1\nARG B=1 C"), {})
    check_values(file, {"A": "", "B": "", "C": ""}, "it")
    with pytest.raises(ImageError, match="image it declares no build argument D; it has A, B, C"):
        check_values(file, {"D": ""}, "it")


def test_scratch_image_with_all_of_a_stage_is_that_stage_without_its_configuration(folder: Path) -> None:
    text = """
        FROM base:1 AS build
        ENV A=1
        WORKDIR /work
        USER 1500
        CMD ["run"]
        RUN env
        FROM scratch
        ENV B=2
        COPY --link --from=build / /
        CMD ["other"]
        RUN true
    """
    build, last = planned(text, folder)
    assert (last.base, last.parent, len(last.steps)) == (BASE, 0, 1)
    assert last.config.env == {"PATH": SEARCH_PATH, "B": "2"}
    assert (last.config.workdir, last.config.user, last.config.command) == ("", "", ["other"])
    # their common part is one layer
    assert planned(text.replace("RUN true", ""), folder)[-1].key == build.key
    (of_image,) = planned("FROM scratch\nCOPY --from=base:1 / /\nRUN env", folder)
    assert (of_image.base, of_image.parent, of_image.config.env) == (BASE, None, {"PATH": SEARCH_PATH})


@pytest.mark.parametrize(
    "rest",
    [
        "COPY a.txt /",
        "COPY --from=build /tool /",
        "COPY --from=build --chown=1 / /",
        "COPY --from=build /etc/.. /opt",
        "RUN true\nCOPY --from=build / /",
        "WORKDIR /x\nCOPY --from=build / /",
        "ENV A=1",
    ],
)
def test_other_scratch_images_are_refused(folder: Path, rest: str) -> None:
    with pytest.raises(ImageError, match=r"FROM scratch: no image scratch"):
        planned(f"FROM base:1 AS build\nFROM scratch\n{rest}\n", folder)
