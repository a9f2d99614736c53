"""Outcomes that nothing can record are an error by a control, never a 0; a patch that hides its own results gets 0.

Each patch is scored as the first of its instance, so that no earlier proof excuses it. `make test LONG=1` runs a few,
`make soak` all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from farm.errors import EvaluatorError
from tests.conftest import absent
from tests.integration.scores import issue_project
from tests.integration.scores.swe_project import GOLD, Pool, Project, score
from tests.services.soak import at_length
from workers.evaluators import process_end
from workers.evaluators.issues.confirmation import SandboxWithVariables
from workers.evaluators.program_source import source_of
from workers.plugins.interfaces import FreshSandbox, Sandbox, Score
from workers.plugins.registry import sandbox as provider

pytestmark = [pytest.mark.timeout(1200), pytest.mark.soak]
WRONG = "sed -i 's/a - b/a * b/' calc/core.py"
_MANAGERS = "import gc\nfor m in [o for o in gc.get_objects() if type(o).__name__ == 'PytestPluginManager']:\n"
_BODIES: Mapping[str, str] = {
    "no_syntax": "def add(a, b) return",
    "ends_pytest": "import os\nos._exit(0)",
    "kills_its_parent": "import os\nos.kill(os.getppid(), 9)",
    "names_missing": "sub = 1",
    "skips_the_module": "import pytest\npytest.skip('later', allow_module_level=True)",
    "exits_pytest": "import pytest\npytest.exit('done', returncode=0)",
    "usage_error": "import pytest\nraise pytest.UsageError('no')",
    "interrupts": "raise KeyboardInterrupt",
    "closes_all_pipes": "import os\nos.closerange(3, 5000)",
    "removes_the_plugin": "import glob, shutil, sys\n"
    "for p in glob.glob('/tmp/tmp*'): shutil.rmtree(p, True)\nsys.exit(0)",
    "no_plugins_left": _MANAGERS + "    for p in list(m.get_plugins()): m.unregister(p)",
    "plugin_unregistered": _MANAGERS + "    for n, p in list(m.list_name_plugin()):\n"
    "        if n.startswith('_') and len(n) == 9: m.unregister(p)",
    "nothing_written": "import os\nos.write = lambda fd, data: len(data)\nos._exit(0)",
}
HOSTILE: Mapping[str, str] = {
    **{name: f"cat > calc/core.py <<'THE_END'\n{body}\nTHE_END" for name, body in _BODIES.items()},
    "package_removed": "rm -r calc",
    "package_is_a_file": "rm -r calc; echo x > calc.py",
    "not_to_be_read": "printf '\\xff\\xfe' > calc/__init__.py",
}
"""Patches with which no test of the instance is reported as passed, some with an end that looks normal."""
CHOSEN = at_length(["no_syntax", "ends_pytest", "skips_the_module", "plugin_unregistered"], [*HOSTILE])


@dataclass(frozen=True)
class Fault:
    """A fault in a program that the farm sends, in the tests' command, or in the interpreter's environment."""

    program: str = ""
    change: tuple[str, str] = ("", "")
    command: tuple[str, str] = ("", "")
    variables: Mapping[str, str] | None = None


FAULTS: Mapping[str, Fault] = {
    "plug-in that does not load": Fault("outcomes_plugin", ("import hmac", "import hmacs")),
    "plug-in that sends nothing": Fault("outcomes_plugin", ("data[write(descriptor, data) :]", 'b""')),
    "plug-in that is not there": Fault("outcomes_reader", ("write_text(source)", "with_suffix('.txt')")),
    "reader that fails": Fault("outcomes_reader", ("        end_descendants()\n", "        end_all()\n")),
    "pytest that takes no plug-ins": Fault(command=("python ", "env -u PYTEST_ADDOPTS python ")),
    "interpreter that does not start": Fault(variables={"PYTHONHOME": "/nowhere"}),
    "command that is not there": Fault(command=("python ", "pythons ")),
}
ALL_FAULTS = [(name, with_gold) for name in FAULTS for with_gold in (True, False)]
CHOSEN_FAULTS = at_length([ALL_FAULTS[0], ALL_FAULTS[9], ALL_FAULTS[10]], ALL_FAULTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if missing := provider("namespace").missing():
        absent(missing)
    return tmp_path_factory.mktemp("project")


@pytest.fixture(scope="module")
def project(folder: Path) -> Project:
    return Project(folder)


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return the proofs of scorers: none yet."""
    result: dict[str, float] = {}
    monkeypatch.setattr(process_end, "_proven", result)
    return result


def with_variables(fresh: FreshSandbox, variables: Mapping[str, str]) -> FreshSandbox:
    @asynccontextmanager
    async def opened(*_: object, **__: object) -> AsyncIterator[Sandbox]:
        async with fresh() as sandbox:
            yield SandboxWithVariables(sandbox, variables)

    return opened


def inject(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*names: str) -> str:
        text = source_of(*names)
        if fault.program not in names:
            return text
        assert fault.change[0] in text
        return text.replace(*fault.change)

    for module in ("tests", "patches"):
        monkeypatch.setattr(f"workers.evaluators.{module}.source_of", damaged)


def score_in_order(scores: Callable[[str], Awaitable[Score]], names: Sequence[str], proven: dict[str, float]) -> object:
    """Score each as the first of its instance; return the values, and the error messages."""

    async def main() -> dict[str, float | str | None]:
        result: dict[str, float | str | None] = {}
        for name in names:
            proven.clear()
            try:
                result[name] = (await scores(name)).value
            except EvaluatorError as error:
                result[name] = str(error)
        return result

    return asyncio.run(main())


@pytest.mark.parametrize(("name", "with_gold"), CHOSEN_FAULTS)
def test_unreadable_outcomes_are_an_error(
    name: str, with_gold: bool, project: Project, proven: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    inject(fault, monkeypatch)
    gold = project.patch(GOLD)
    plan = project.plan()
    plan = replace(plan, command=plan.command.replace(*fault.command), gold=gold.decode() if with_gold else "")

    async def main() -> list[Score | BaseException]:
        pool = Pool(1)
        fresh = with_variables(pool.fresh(), fault.variables or {})
        patches = (gold, project.patch(WRONG))
        try:
            return await asyncio.gather(*(score(plan, patch, fresh) for patch in patches), return_exceptions=True)
        finally:
            await pool.close()

    for result in asyncio.run(main()):
        assert isinstance(result, EvaluatorError), result
        assert "a control that must pass did not" in str(result)


@pytest.mark.parametrize("with_gold", at_length([True], [True, False]))
def test_patch_that_hides_its_results_scores_zero(with_gold: bool, project: Project, proven: dict[str, float]) -> None:
    plan = replace(project.plan(), gold=project.patch(GOLD).decode() if with_gold else "")
    fresh = Pool(1).fresh(alone=True)
    found = score_in_order(lambda name: score(plan, project.patch(HOSTILE[name]), fresh), CHOSEN, proven)
    assert found == dict.fromkeys(CHOSEN, 0.0)


def scores_of_rows(rows: list[dict[str, str]], patches: list[bytes], project: Project, folder: Path) -> list[object]:
    async def main() -> list[object]:
        shared = issue_project.SharedSandboxes(1)
        try:
            return await asyncio.gather(
                *(
                    issue_project.score(issue_project.row_of(project, folder, **row), patch, shared.fresh())
                    for row in rows
                    for patch in patches
                ),
                return_exceptions=True,
            )
        finally:
            await shared.close()

    return asyncio.run(main())


_COMMANDS = [
    "env PYTHONHOME=/nowhere python -m pytest -rA",
    "python -m pytest -rA > /dev/null",
    "pytests -rA",
]


@pytest.mark.parametrize("command", at_length(_COMMANDS[:1], _COMMANDS))
def test_log_without_results_is_an_error_if_the_solution_has_none(
    command: str, project: Project, folder: Path, proven: object
) -> None:
    gold = project.patch(GOLD)
    row = {"patch": gold.decode(), "test_cmd": command}
    for result in scores_of_rows([row], [gold, project.patch(WRONG)], project, folder):
        assert isinstance(result, EvaluatorError), result
        assert "a control that must pass did not: the reference solution: " in str(result)


def test_patch_with_an_unreadable_second_run_is_an_error(
    project: Project, folder: Path, proven: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(FAULTS["plug-in that does not load"], monkeypatch)
    gold = project.patch(GOLD)
    for result in scores_of_rows([{"patch": gold.decode()}, {"patch": ""}], [gold], project, folder):
        assert isinstance(result, EvaluatorError), result
        assert "a control that must pass did not: no test was reported as passed" in str(result)


def test_patch_of_a_row_that_hides_its_results_scores_zero(
    project: Project, folder: Path, proven: dict[str, float]
) -> None:
    row = issue_project.row_of(project, folder, patch=project.patch(GOLD).decode())

    async def scored(name: str) -> Score:
        shared = issue_project.SharedSandboxes(1)
        try:
            return await issue_project.score(row, project.patch(HOSTILE[name]), shared.fresh())
        finally:
            await shared.close()

    chosen = at_length(CHOSEN[:2], CHOSEN)
    assert score_in_order(scored, chosen, proven) == dict.fromkeys(chosen, 0.0)
