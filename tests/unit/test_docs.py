"""The documentation is correct: links, files, commands, settings and routes exist; examples run."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import farm
from farm.adapters.arrays import arrays
from farm.adapters.conformance.adapter_promises import examine_adapter
from farm.api import openapi
from farm.api.app import ENDPOINTS
from farm.cli.engines import engines
from farm.cli.main import COMMANDS
from farm.records.request import Limits, SamplingParams, SandboxSpec
from farm.records.rollout import Outcome, Rollout, Stage, State
from farm.records.trajectory import ModelCall, segments, token_ids
from farm.settings import Settings
from tests.chaos.faults import KINDS
from workers.agents.harness import Harness, HarnessAgent
from workers.conformance.bench import PROMISES
from workers.plugins.handler import Handler
from workers.plugins.interfaces import NO_MODELS, AgentContext, AgentResult, Artefact, Observation, Sandbox
from workers.testing import FakeSandbox, ScriptedPolicy, answering
from workers.testing.local_sandbox import LocalProvider

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(
        page
        for folder in ("docker", "deploy", "examples", "farm", "tests")
        for page in (ROOT / folder).rglob("README.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS = "farm|workers|tests|testkit|examples|alembic|docker|benchmarks|docs"
MAX_README_LINES = 150
MAX_LINE = 120
CODE = ("farm", "workers", "testkit", "benchmarks", "examples", "alembic", "tests/oracles")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """Return the text of a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_counts_of_promises_and_faults_equal_those_of_the_code() -> None:
    text = (ROOT / "docs" / "concepts" / "promises.md").read_text() + (ROOT / "README.md").read_text()
    assert set(re.findall(r"(\d+)\s+promises\s+of\s+a\s+sandbox", text)) == {str(len(PROMISES))}
    assert set(re.findall(r"by\s+(\d+)\s+kinds\s+of\s+faults|its\s+(\d+)\s+kinds\s+of\s+faults", text)) == {
        (str(len(KINDS)), ""),
        ("", str(len(KINDS))),
    }


def blocks(page: Path, language: str) -> list[str]:
    result: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return result


def code(page: Path) -> str:
    """Return all code of a page: its blocks and its code spans, one per line."""
    return "\n".join([*blocks(page, r"\w*"), *re.findall(r"`([^`\n]+)`", prose(page))])


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and mkdocs both make them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[ ]+", "-", re.sub(r"[^\w\- ]", "", heading.lower()).strip()) for heading in headings}


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the file and the anchor of each link within the repository; an empty file is the page itself."""
    for target in re.findall(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"[a-z]+:", target):
            file, _, anchor = target.partition("#")
            yield file, anchor


@every_page
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for file, anchor in links(page):
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name} links to {file}, which does not exist"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {file}#{anchor}: no such heading"


@every_page
def test_named_files_exist(page: Path) -> None:
    named = set(re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", prose(page)))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_files_that_code_names_exist() -> None:
    """Docstrings, comments and messages name pages of docs/, and files by their path in backquotes."""
    sources = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    named = {
        (path, name)
        for path in sources
        for name in re.findall(
            rf"(?<![\w./])docs/[\w./-]+\.md|(?<=`)(?:{FOLDERS})/[\w./-]*\w\.\w+(?=`)", path.read_text()
        )
    }
    assert len(named) > 20
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in sorted(named) if not (ROOT / name).exists()] == []


@every_page
def test_named_commands_exist(page: Path) -> None:
    assert set(re.findall(r"^farm ([a-z]+)", code(page), re.MULTILINE)) <= set(COMMANDS)
    assert set(re.findall(r"^farm engines ([a-z-]+)", code(page), re.MULTILINE)) <= set(engines.commands)


@every_page
def test_named_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make ([a-z-]+)", code(page), re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@every_page
def test_named_settings_exist(page: Path) -> None:
    known = {f"FARM_{name.upper()}" for name in Settings.model_fields} | {"FARM_TEST_SEED", "FARM_CONFIG", "FARM_NAME"}
    assert set(re.findall(r"FARM_[A-Z_]+[A-Z]", page.read_text())) <= known


@every_page
def test_named_modules_exist(page: Path) -> None:
    for name in set(re.findall(r"python -m ([\w.]+)", page.read_text())):
        path = ROOT.joinpath(*name.split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


def keywords_of(function: Any) -> set[str]:
    """Return the fields of a model, or the parameters of a function; `rows` takes those of its adapter, too."""
    adapter = keywords_of(arrays) if function is farm.Farm.rows else set()
    return set(getattr(function, "model_fields", None) or inspect.signature(function).parameters) | adapter


@every_page
def test_python_examples_use_existing_attributes_and_arguments(page: Path) -> None:
    owners: dict[str, Any] = {"farm": farm, "client": farm.Farm}
    for node in (node for block in blocks(page, "python") for node in ast.walk(ast.parse(block))):
        called = node.func if isinstance(node, ast.Call) else node
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id in owners:
            # an attribute that does not exist raises
            used = getattr(owners[called.value.id], called.attr)
            named = {keyword.arg for keyword in node.keywords} if isinstance(node, ast.Call) else set()
            assert named <= keywords_of(used) if named else True, f"{called.attr}({named})"


@every_page
def test_lines_are_short(page: Path) -> None:
    """Rows of tables and lines of JSON cannot be broken, so they may be longer."""
    text = re.sub(r"(?s)(?<=<!-- generated).*?(?=<!-- end)", "", page.read_text())
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "{", "!["))]
    assert [line for line in lines if len(line) > MAX_LINE] == []


@every_page
def test_tables_have_a_head(page: Path) -> None:
    tables = re.findall(r"(?m)(?<!\|\n)^ *\|.*\n(.*\n)", prose(page))
    assert [line for line in tables if not re.fullmatch(r" *\|[-:| ]+\|\n", line)] == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_readme_and_architecture_show_the_same_picture() -> None:
    pictures = [
        block
        for page in ("README.md", "docs/concepts/architecture.md")
        for block in re.findall(r"^```\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
        if "dispatcher" in block
    ]
    assert len(pictures) == 2
    assert pictures[0] == pictures[1]


def test_every_page_is_in_the_navigation_and_on_the_index() -> None:
    def pages_of(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for each in entry.values() if isinstance(entry, dict) else entry:
                yield from pages_of(each)

    docs = ROOT / "docs"
    written = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    assert set(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])) == written
    for name in written - {"index.md"}:
        index = index_of(docs / name)
        assert docs / name in linked(index), f"{index.relative_to(ROOT)} has no link to {name}"
    entries = {docs / name for name in ("quickstart.md", "concepts/index.md", "how-to/index.md", "reference/index.md")}
    assert entries <= linked(ROOT / "README.md") & linked(docs / "index.md")


def index_of(page: Path) -> Path:
    """Return the page that has to link to a page: `NAME.md` next to its folder NAME, or the nearest index.md above."""
    folder = page.parent if page.name != "index.md" else page.parent.parent
    for each in (folder, *folder.parents):
        for index in (each.with_suffix(".md"), each / "index.md"):
            if index.exists():
                return index
    raise LookupError(page)


def linked(page: Path) -> set[Path]:
    """Return the files that a page links to."""
    return {(page.parent / file).resolve() for file, _ in links(page) if file}


def test_every_command_is_described() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert set(re.findall(r"^farm ([a-z]+)", page, re.MULTILINE)) == set(COMMANDS)
    assert set(re.findall(r"^farm engines ([a-z-]+)", page, re.MULTILINE)) == set(engines.commands)


def test_every_route_is_described() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    described = {(method.lower(), path) for method, path in re.findall(r"`(GET|POST) (/[\w./{}]*)`", page)}
    served = {(method, path) for path, methods in openapi.description(ENDPOINTS)["paths"].items() for method in methods}
    assert described == served


def test_glossary_is_sorted_and_short() -> None:
    words = re.findall(r"^\| \*\*(.+?)\*\*", (ROOT / "docs" / "concepts" / "glossary.md").read_text(), re.MULTILINE)
    assert 25 <= len(words) <= 40
    assert words == sorted(words, key=str.lower)


@every_page
def test_examples_import_their_names(page: Path) -> None:
    """Names that a reader has to fill in are in lower case; all others are defined or imported on the page."""
    ruff = [str(Path(sys.executable).with_name("ruff")), "check", "--isolated", "--select", "F821"]
    code = "\n".join(blocks(page, "python"))
    ran = subprocess.run([*ruff, "--output-format", "json", "-"], input=code, capture_output=True, text=True)
    undefined = {each["message"].split("`")[1] for each in json.loads(ran.stdout)}
    assert not [name for name in undefined if not name.islower() or name in sys.stdlib_module_names | {"farm", "vf"}]


def code_with(page: str, name: str) -> str:
    return next(block for block in blocks(ROOT / "docs" / page, "python") if name in block)


def test_agent_of_the_example_runs() -> None:
    names: dict[str, Any] = {}
    exec(code_with("how-to/plugins/agents.md", "ONE_QUESTION"), names)
    shown: Harness = names["ONE_QUESTION"]
    assert names["one_question"]().sandbox(None).agent_packages == shown.packages
    # in a folder of this machine, where its client is already installed
    here = replace(shown, packages=(), command=lambda task: [sys.executable, *shown.command(task)[1:]])

    async def main() -> AgentResult:
        sandbox = await LocalProvider().start("docs", SandboxSpec())
        try:
            agent = HarnessAgent(here, inside=str(sandbox.socket_folder))
            return await agent.run(context_of(sandbox))
        finally:
            await sandbox.stop()

    assert asyncio.run(main()) == AgentResult(Outcome.ANSWERED, "Lima")


def context_of(sandbox: Sandbox) -> AgentContext:
    async def record(call: ModelCall) -> None: ...
    async def keep(index: int, artefact: Artefact) -> str:
        return artefact.name

    return AgentContext(
        rollout_id="docs",
        messages=[{"role": "user", "content": "What is the capital of Peru?"}],
        tools={},
        policy=ScriptedPolicy(answering("Lima")),
        sampling=SamplingParams(),
        limits=Limits(),
        record=record,
        keep=keep,
        sandbox=sandbox,
    )


def test_handler_of_the_example_is_valid() -> None:
    names: dict[str, Any] = {"__name__": "example"}
    exec(code_with("how-to/plugins/handlers.md", "CapitalHandler"), names)
    kind = names["CapitalHandler"]
    assert issubclass(kind, Handler)
    handler = kind(kind.instance_type.model_validate({"country": "Peru", "capital": "Lima"}))
    assert handler.messages() == [{"role": "user", "content": "What is the capital of Peru?"}]
    assert handler.sandbox() is None
    assert handler.evaluator(NO_MODELS).name == "contains"


def test_tool_of_the_example_counts_words() -> None:
    names: dict[str, Any] = {"__name__": "example"}
    exec(code_with("how-to/plugins/handlers.md", "CountTool"), names)

    async def main() -> Observation:
        sandbox = FakeSandbox("docs")
        await sandbox.write_file("/workspace/a.txt", b"one two three")
        tool = names["CountTool"](sandbox)
        observation: Observation = await tool.call(tool.arguments(path="/workspace/a.txt"), 1.0)
        await tool.close()
        return observation

    assert asyncio.run(main()) == Observation("3 words")


def test_adapter_of_the_example_accepts_trainable_rollouts() -> None:
    names: dict[str, Any] = {}
    exec(code_with("how-to/users/trainers.md", "rows_for_my_trainer"), names)
    adapter = names["rows_for_my_trainer"]
    assert [result.fault for result in examine_adapter(adapter) if not result.ok] == []
    rows = adapter([finished(1.0), finished(None)])
    assert rows == [
        {
            "prompt": [1, 2],
            "response": [3, 4],
            "loss_mask": [1, 1],
            "old_logprobs": [-0.5, -0.25],
            "reward": 1.0,
            "group": "b.0",
        }
    ]


def finished(reward: float | None) -> Rollout:
    call = ModelCall(
        index=0,
        messages=[],
        response={"role": "assistant", "content": "Lima"},
        finish_reason="stop",
        engine="fake",
        started_at=0.0,
        latency_s=0.0,
        n_prompt_tokens=2,
        n_response_tokens=2,
        prompt_ids=token_ids([1, 2]),
        response_ids=token_ids([3, 4]),
        response_logprobs=np.array([-0.5, -0.25], np.float32),
    )
    return Rollout(
        rollout_id="b.0.0",
        batch_id="b",
        group_index=0,
        sample_index=0,
        data_source="math",
        instance_id="",
        stage=Stage.EVAL,
        state=State.COMPLETED if reward is not None else State.FAILED,
        attempt=1,
        node=None,
        outcome=Outcome.ANSWERED if reward is not None else Outcome.ENGINE_ERROR,
        reward=reward,
        failure=None,
        n_turns=1,
        n_response_tokens=2,
        submitted_at=0.0,
        finished_at=1.0,
        finish_seq=1,
        segments=segments([call]),
    )
