"""The comparisons with oracles: cases, the query, the farm's result, and the known differences.

An oracle is another project's own code, run by a program of `programs/` in its own environment. A difference that no
pattern of `known` matches is a fault, and so is a pattern that matches no difference.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from farm.errors import FarmError
from tests.conftest import absent
from tests.oracles import farm_readings
from tests.oracles.cases.answer_cases import LIBRARY, RULES, answer_cases, template_cases
from tests.oracles.cases.ignored_cases import ignored_cases
from tests.oracles.cases.prime_math_cases import prime_math_cases
from tests.oracles.cases.reward_cases import gate_cases, reward_cases, total_cases
from tests.oracles.cases.screen_cases import screen_cases
from tests.oracles.cases.slime_cases import SLIME_RULES, SYMPY_RULES, slime_cases
from tests.oracles.cases.task_cases import TASK as HARBOR_TASK
from tests.oracles.cases.task_cases import task_cases
from tests.oracles.cases.terminal_bench_cases import TASK as TERMINAL_BENCH_TASK
from tests.oracles.cases.terminal_bench_cases import conversion_cases, output_cases, task_yaml_cases
from tests.oracles.cases.turn_cases import turn_cases
from workers.evaluators.answers.equality import of_whole_response

ROOT = Path(__file__).parents[2]
SAMPLES = (ROOT / "examples" / "tasks" / "harbor", ROOT / "tests" / "data" / "harbor_cookbook")
RECORDED = ROOT / "tests" / "data" / "oracles"
PROGRAMS = Path(__file__).parent / "programs"
REFUSED = "refuses"
"""The result of a refused case."""
USUAL = "as usual"
SEPARATE = 'verifier.environment_mode = "separate"'

_ASKS = r"^.*: farm: it asks for .*"
_GIVEN = (
    (r"^a test.bat of Windows: farm: .*no tests/test.sh", "sandboxes are Linux"),
    (_ASKS + r"sidecar services", "a sandbox has no sidecar services and no MCP servers"),
    (_ASKS + r"\d+ GPUs", "a sandbox has no GPU"),
    (_ASKS + r"a network to these hosts only", "a sandbox has the node's whole network or none"),
    (_ASKS + r"another user in a step", "a sandbox has one user for the agent"),
    (_ASKS + r"another network in one step", "a sandbox has one network for the agent"),
    (_ASKS + r"an earlier conversation", "a conversation begins with the task's instruction"),
    (_ASKS + r"the services of .*docker-compose\.yaml", "a verifier has no sidecar services"),
    (_ASKS + r"accelerators", "a sandbox has no TPU"),
)
_STRICTER = (
    (r": farm: .*is not a positive number of seconds", "a time limit must be positive and finite"),
    (
        r": farm: .*(cpus|memory_mb|storage_mb): Input should be greater than 0",
        "a limit of processors, memory or disk must be positive",
    ),
    (
        r": farm: .*healthcheck\.\w+: Input should be greater than or equal to",
        "numbers in a health check must not be negative",
    ),
    (r": farm: .*(command: String|source: Value) should have at least 1", "a command or path must not be empty"),
    (r": farm: .*it is empty: the policy would get no instruction", "without an instruction there is nothing to run"),
    (
        r": farm: .*schema_version '.*' is not one of",
        "the fields of a later schema are unknown; Harbor does not check the version",
    ),
    (
        r"^task\.name = .*\\n.*: farm: .*ORGANISATION/NAME",
        "a name must have one line; Harbor's pattern accepts a line break at the end",
    ),
)


@dataclass(frozen=True, slots=True)
class OracleComparison:
    """One query to an oracle. `known` are patterns of lines of `_difference`, each with its reason."""

    name: str
    oracle: str
    query: str
    cases: Callable[[], Mapping[str, Any]]
    to_input: Callable[[Any], Any]
    farm_result: Callable[[Any], Any]
    known: tuple[tuple[str, str], ...] = ()
    compact: bool = False
    """True to store each result as its difference from the result of the plain case."""
    sources: str = ""
    """The folder of an oracle that is not a package, next to the environment."""

    @property
    def recorded(self) -> Path:
        """The file with the oracle's results."""
        return RECORDED / f"{self.name}.json"


@dataclass(slots=True)
class Agreement:
    """The cases of a query: how many are equal, refused by both, or differ for a known reason; the rest."""

    equal: int = 0
    refused: int = 0
    known: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def _of_folder(reading: Callable[[Path], Any], rest: Mapping[str, str]) -> Callable[[Any], Any]:
    def farm_result(case: Any) -> Any:
        if isinstance(case, Path):
            return reading(case)
        with farm_readings.written(case, rest) as folder:
            return reading(folder)

    return farm_result


def _task_files(case: Any) -> Any:
    return {"folder": str(case)} if isinstance(case, Path) else {"files": {**HARBOR_TASK, **case}}


def _tasks() -> Mapping[str, Any]:
    samples = [path.parent for top in SAMPLES for path in sorted(top.glob("*/task.toml"))]
    return {"plain": {}, **{f"sample {path.name}": path for path in samples}, **task_cases()}


def _bench_files(case: Any) -> Any:
    return {"files": {**TERMINAL_BENCH_TASK, **case}}


COMPARISONS = (
    OracleComparison(
        "harbor_tasks",
        "harbor",
        "tasks",
        _tasks,
        _task_files,
        _of_folder(farm_readings.read, HARBOR_TASK),
        (
            *_GIVEN,
            *_STRICTER,
            (
                r"^a compose file for a Dockerfile: farm: .*needs an image: environment/Dockerfile",
                "no image is taken from a compose file",
            ),
            (r"^a step's solution that lacks its script: .*solution", "the task's own solution is tried then"),
        ),
        compact=True,
    ),
    OracleComparison(
        "harbor_uploads",
        "harbor",
        "uploads",
        ignored_cases,
        _task_files,
        _of_folder(farm_readings.uploads, HARBOR_TASK),
    ),
    OracleComparison(
        "harbor_rewards",
        "harbor",
        "rewards",
        reward_cases,
        lambda case: case,
        farm_readings.rewards,
        ((r": farm: .*holds 0 rewards", "an empty table is no result, like a missing file"),),
    ),
    OracleComparison("harbor_gates", "harbor", "gates", gate_cases, lambda case: case, farm_readings.passes_gate),
    OracleComparison("harbor_totals", "harbor", "totals", total_cases, lambda case: case, farm_readings.sums),
    OracleComparison(
        "harbor_conversions",
        "harbor",
        "conversions",
        conversion_cases,
        _bench_files,
        _of_folder(farm_readings.converted, TERMINAL_BENCH_TASK),
        (
            (_ASKS + r"folders of the host", "a sandbox sees no folders of the host"),
            (_ASKS + r"privileges", "a sandbox has no privileges"),
            (_ASKS + r"sidecar services", "a sandbox has no sidecar services"),
            (_ASKS + r"`network_mode` of service", "a sandbox has no other network than the batch gives"),
            (
                r"commands for a solution: oracle refuses",
                "terminal-bench 1 runs a solution.yaml; Harbor's mapper does not",
            ),
            (r"no compose file: oracle refuses", "a task without a compose file has a single service"),
            (
                r"a compose file without services: farm",
                "terminal-bench 1 cannot start it; Harbor's mapper ignores it",
            ),
            (
                r"folder to build in: context",
                "the build context is only this folder; Harbor's mapper also copies the rest",
            ),
        ),
    ),
    OracleComparison(
        "terminal_bench_tasks",
        "terminal-bench",
        "tasks",
        task_yaml_cases,
        _bench_files,
        _of_folder(farm_readings.task_yaml, TERMINAL_BENCH_TASK),
        (
            (r": farm: .*is not a positive number of seconds", _STRICTER[0][1]),
            (
                r": farm: .*instruction: String should have at least 1",
                "without an instruction there is nothing to run",
            ),
            (r": farm: .*not pytest or swebench", "parsers of adapters with services or tests of their own"),
            (
                r"^(difficulty|tags|estimated_duration_sec|task.yaml): .*oracle refuses",
                "fields that only describe a task are not checked",
            ),
        ),
    ),
    OracleComparison(
        "terminal_bench_outputs",
        "terminal-bench",
        "outputs",
        output_cases,
        lambda case: case,
        farm_readings.resolved,
        (
            (
                r"oracle 'no results, resolved: True', farm False",
                "a summary without results does not show that a test passed",
            ),
        ),
    ),
    OracleComparison(
        "answer_rules",
        "answer-rules",
        "scores",
        lambda: {f"{rule} {number}": case for rule in RULES for number, case in enumerate(answer_cases(rule))},
        asdict,
        farm_readings.score_by_authors,
    ),
    OracleComparison(
        "answer_templates",
        "answer-rules",
        "scores",
        lambda: {f"{case.rule} {number}": case for number, case in enumerate(template_cases())},
        asdict,
        farm_readings.score_by_authors,
    ),
    OracleComparison(
        "slime_rules",
        "answer-rules",
        "scores",
        lambda: {f"{rule} {number}": case for rule in SLIME_RULES for number, case in enumerate(slime_cases(rule))},
        asdict,
        farm_readings.score_by_authors,
        sources="slime",
    ),
    OracleComparison(
        "slime_sympy",
        "answer-rules",
        "scores",
        lambda: {f"{rule} {number}": case for rule in SYMPY_RULES for number, case in enumerate(slime_cases(rule))},
        asdict,
        farm_readings.score_by_sympy,
        sources="slime",
    ),
    OracleComparison(
        "prime_math",
        "answer-rules",
        "scores",
        lambda: {f"{case.rule} {number}": case for number, case in enumerate(prime_math_cases())},
        asdict,
        farm_readings.score_by_sympy,
    ),
    OracleComparison(
        "math_library",
        "answer-rules",
        "scores",
        lambda: {f"{LIBRARY} {number}": case for number, case in enumerate(answer_cases(LIBRARY))},
        asdict,
        lambda case: of_whole_response(case.response, {"gold": case.golds[0]}),
    ),
    OracleComparison(
        "terminal_screens",
        "pyte",
        "screens",
        screen_cases,
        lambda case: case,
        farm_readings.screen,
        (
            (r"^deletions ", "pyte keeps a deleted line if no other line replaces it"),
            (r"^halves ", "the remaining half of a wide character becomes a blank, as in xterm"),
            (r"^long lines ", "lines are not wrapped: pipes have no width"),
            (r"^more parameters .*: oracle refuses", "pyte raises an error on more parameters than a sequence takes"),
            (r"^other sequences ", "pyte does not support `b`, `s`, `u`, `S`, `T`, HPA, NEL and alternate screens"),
            (r"^regions ", "scrolling regions are ignored"),
            (r"^strings ", "a title or other string without an end is ended by the line break"),
        ),
    ),
    OracleComparison(
        "repeated_turns",
        "openhands",
        "repetitions",
        turn_cases,
        lambda case: case,
        farm_readings.repetition,
        (
            (r"^errors .*: oracle [1-9]", "the same call three times with an error, regardless of the error's text"),
            (r"^outputs .*: oracle [1-9]", "results of commands are compared only by command and exit code"),
            (r"^thoughts .*, farm [1-9]", "the text next to a call is compared, too"),
            (
                r"^(texts|mixed) ",
                "the same text three times, regardless of the user's replies; alternating texts are not detected",
            ),
            (r"^several ", "calls of a turn are compared one by one"),
        ),
    ),
)


def query_oracle(comparison: OracleComparison) -> dict[str, Any]:
    """Return the results of an oracle's own code, as they are recorded. Skips the test if it is not installed."""
    python = Path(os.environ["FARM_TEST_ORACLES"]) / comparison.oracle / ".venv" / "bin" / "python"
    if not python.exists():
        absent(f"{comparison.oracle} is not installed: tests/oracles/environment.sh says why")
    if not (python.parents[2] / comparison.sources).exists():
        absent(f"the sources of {comparison.sources} are not there: tests/oracles/environment.sh says why")
    program = PROGRAMS / f"{comparison.oracle.replace('-', '_')}_oracle.py"
    cases = {name: comparison.to_input(case) for name, case in comparison.cases().items()}
    text = json.dumps({"variables": farm_readings.VARIABLES, "cases": cases})
    done = subprocess.run([python, program, comparison.query], input=text, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    answers = {name: answer.get("value", REFUSED) for name, answer in json.loads(done.stdout).items()}
    return _compact(answers) if comparison.compact else answers


def _compact(answers: Mapping[str, Any]) -> dict[str, Any]:
    plain, separate = _flat(answers["plain"]), _flat(answers[SEPARATE])
    kept = {
        name: answer if answer == REFUSED else _differences_from(_flat(answer), plain, separate)
        for name, answer in answers.items()
    }
    return kept | {"plain": plain, SEPARATE: separate}


def _flat(value: Any, place: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        parts = [_flat(each, f"{place}.{name}" if place else name) for name, each in value.items()]
    elif isinstance(value, list) and place == "steps":
        parts = [_flat(each, f"{place}.{number}") for number, each in enumerate(value)]
    else:
        return {place: value}
    return {name: each for part in parts for name, each in part.items()}


def _differences_from(
    reading: Mapping[str, Any], plain: Mapping[str, Any], separate: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the differences from the result of the plain task, in which all steps are alike."""
    usual = {**separate, **plain}
    first = {name: re.sub(r"^steps\.\d+", "steps.0", name) for name in reading}
    gone = {name: None for name in plain if name not in first.values() and plain[name] not in (None, {}, [])}
    kept = {name: each for name, each in reading.items() if first[name] not in usual or each != usual[first[name]]}
    return {**gone, **kept, "n_steps": len({name.split(".")[1] for name in reading if name.startswith("steps.")})}


def compare(comparison: OracleComparison, oracle_results: Mapping[str, Any]) -> Agreement:
    """Compare an oracle's results with the farm's."""
    cases, result = comparison.cases(), Agreement()
    farm_results: dict[str, Any] = {}
    refusals: dict[str, str] = {}
    for name, case in cases.items():
        try:
            farm_results[name] = comparison.farm_result(case)
        except FarmError as error:
            farm_results[name], refusals[name] = REFUSED, " ".join(str(error).split())
    farm_results = json.loads(json.dumps(_compact(farm_results) if comparison.compact else farm_results))
    assert list(cases) == list(oracle_results), "the cases differ from the recorded ones"
    for name in cases:
        if farm_results[name] == oracle_results[name]:
            result.refused += farm_results[name] == REFUSED
            result.equal += farm_results[name] != REFUSED
            continue
        line = _difference(name, oracle_results[name], farm_results[name], refusals.get(name, ""))
        reasons = [reason for pattern, reason in comparison.known if re.search(pattern, line)]
        if reasons:
            result.known[reasons[0]] += 1
        else:
            result.faults.append(line)
    result.faults += [f"no case differs by {reason!r}" for _, reason in comparison.known if not result.known[reason]]
    return result


def _difference(name: str, oracle_result: Any, farm_result: Any, refusal: str) -> str:
    if farm_result == REFUSED:
        return f"{name}: farm: {refusal}"
    if oracle_result == REFUSED:
        return f"{name}: oracle refuses, farm {farm_result!r}"
    if not isinstance(farm_result, dict) or not isinstance(oracle_result, dict):
        return f"{name}: oracle {oracle_result!r}, farm {farm_result!r}"
    parts = [
        f"{key} is {oracle_result.get(key, USUAL)!r}, farm {farm_result.get(key, USUAL)!r}"
        for key in {**oracle_result, **farm_result}
        if oracle_result.get(key, USUAL) != farm_result.get(key, USUAL)
    ]
    return f"{name}: {'; '.join(parts)}"
