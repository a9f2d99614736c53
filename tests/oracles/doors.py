"""The inputs that have an oracle here: their cases, the query, the farm's result, and the known differences.

An oracle is another project's own code, run by a program of `programs/` in its own environment. A difference that no
rule of `known` explains is a fault; so is a rule that explains no difference.
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
from tests.oracles import our_reading
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

_ASKS = r"^.*: ours: it asks for .*"
_GIVEN = (
    (r"^a test.bat of Windows: ours: .*no tests/test.sh", "sandboxes are Linux"),
    (_ASKS + r"sidecar services", "a sandbox has no services beside it, and no MCP servers"),
    (_ASKS + r"\d+ GPUs", "a sandbox has no GPU"),
    (_ASKS + r"a network to these hosts only", "a sandbox has the node's whole network or none"),
    (_ASKS + r"another user in a step", "a sandbox has one user for the agent"),
    (_ASKS + r"another network in one step", "a sandbox has one network for the agent"),
    (_ASKS + r"an earlier conversation", "a conversation begins with the task's instruction"),
    (_ASKS + r"the services of .*docker-compose\.yaml", "a verifier has no services beside it"),
    (_ASKS + r"accelerators", "a sandbox has no TPU"),
)
_STRICTER = (
    (r": ours: .*is not a positive number of seconds", "a limit of no time, or of endless time, is a mistake"),
    (
        r": ours: .*(cpus|memory_mb|storage_mb): Input should be greater than 0",
        "a limit of no processors, memory or disk is a mistake",
    ),
    (
        r": ours: .*healthcheck\.\w+: Input should be greater than or equal to",
        "a negative number in a health check is a mistake",
    ),
    (r": ours: .*(command: String|source: Value) should have at least 1", "an empty command or path is a mistake"),
    (r": ours: .*it is empty: the policy would get no instruction", "without an instruction there is nothing to play"),
    (r": ours: .*schema_version '.*' is not one of", "what a later schema asks for is not known; Harbor looks at none"),
    (r"^task\.name = .*\\n.*: ours: .*ORGANISATION/NAME", "a name of two lines; Harbor's pattern lets one end so"),
)


@dataclass(frozen=True, slots=True)
class Door:
    """One query to an oracle. `known` are patterns of lines that `differences` gives, each with its reason."""

    name: str
    oracle: str
    question: str
    cases: Callable[[], Mapping[str, Any]]
    asked: Callable[[Any], Any]
    ours: Callable[[Any], Any]
    known: tuple[tuple[str, str], ...] = ()
    compact: bool = False
    """True to store results as the differences from that of the first case."""
    sources: str = ""
    """The folder of an oracle that is not a package, next to the environment."""

    @property
    def recorded(self) -> Path:
        """The file with the oracle's results."""
        return RECORDED / f"{self.name}.json"


@dataclass(slots=True)
class Agreement:
    """The cases of a query: how many are equal, refused by both, or differ for a known reason; the rest."""

    alike: int = 0
    refused: int = 0
    known: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def _of_folder(reading: Callable[[Path], Any], rest: Mapping[str, str]) -> Callable[[Any], Any]:
    def ours(case: Any) -> Any:
        if isinstance(case, Path):
            return reading(case)
        with our_reading.written(case, rest) as folder:
            return reading(folder)

    return ours


def _task_files(case: Any) -> Any:
    return {"folder": str(case)} if isinstance(case, Path) else {"files": {**HARBOR_TASK, **case}}


def _tasks() -> Mapping[str, Any]:
    samples = [path.parent for top in SAMPLES for path in sorted(top.glob("*/task.toml"))]
    return {"plain": {}, **{f"sample {path.name}": path for path in samples}, **task_cases()}


def _bench_files(case: Any) -> Any:
    return {"files": {**TERMINAL_BENCH_TASK, **case}}


DOORS = (
    Door(
        "harbor_tasks",
        "harbor",
        "tasks",
        _tasks,
        _task_files,
        _of_folder(our_reading.read, HARBOR_TASK),
        (
            *_GIVEN,
            *_STRICTER,
            (
                r"^a compose file for a Dockerfile: ours: .*needs an image: environment/Dockerfile",
                "no image is taken from a compose file",
            ),
            (r"^a step's solution that lacks its script: .*solution", "the task's own solution is tried then"),
        ),
        compact=True,
    ),
    Door(
        "harbor_uploads",
        "harbor",
        "uploads",
        ignored_cases,
        _task_files,
        _of_folder(our_reading.uploads, HARBOR_TASK),
    ),
    Door(
        "harbor_rewards",
        "harbor",
        "rewards",
        reward_cases,
        lambda case: case,
        our_reading.rewards,
        ((r": ours: .*holds 0 rewards", "no rewards are no result, as without a file"),),
    ),
    Door("harbor_gates", "harbor", "gates", gate_cases, lambda case: case, our_reading.passes_gate),
    Door("harbor_totals", "harbor", "totals", total_cases, lambda case: case, our_reading.sums),
    Door(
        "harbor_conversions",
        "harbor",
        "conversions",
        conversion_cases,
        _bench_files,
        _of_folder(our_reading.converted, TERMINAL_BENCH_TASK),
        (
            (_ASKS + r"folders of the host", "a sandbox sees no folders of the host"),
            (_ASKS + r"privileges", "a sandbox has no privileges"),
            (_ASKS + r"sidecar services", "a sandbox has no services beside it"),
            (_ASKS + r"`network_mode` of service", "a sandbox has no other network than the batch gives"),
            (
                r"commands for a solution: theirs refuses",
                "terminal-bench 1 runs a solution.yaml; Harbor's mapper does not",
            ),
            (r"no compose file: theirs refuses", "a task without a compose file is one of a single service"),
            (
                r"a compose file without services: ours",
                "terminal-bench 1 cannot start it; Harbor's mapper passes it over",
            ),
            (
                r"folder to build in: context",
                "the build context is the folder alone; Harbor's mapper copies the rest too",
            ),
        ),
    ),
    Door(
        "terminal_bench_tasks",
        "terminal-bench",
        "tasks",
        task_yaml_cases,
        _bench_files,
        _of_folder(our_reading.task_yaml, TERMINAL_BENCH_TASK),
        (
            (r": ours: .*is not a positive number of seconds", _STRICTER[0][1]),
            (
                r": ours: .*instruction: String should have at least 1",
                "without an instruction there is nothing to play",
            ),
            (r": ours: .*not pytest or swebench", "parsers of adapters with services or tests of their own"),
            (
                r"^(difficulty|tags|estimated_duration_sec|task.yaml): .*theirs refuses",
                "what only describes a task is not checked",
            ),
        ),
    ),
    Door(
        "terminal_bench_outputs",
        "terminal-bench",
        "outputs",
        output_cases,
        lambda case: case,
        our_reading.resolved,
        (
            (
                r"theirs 'no results, resolved: True', ours False",
                "a summary without a result shows nothing that was solved",
            ),
        ),
    ),
    Door(
        "answer_rules",
        "answer-rules",
        "scores",
        lambda: {f"{rule} {number}": case for rule in RULES for number, case in enumerate(answer_cases(rule))},
        asdict,
        our_reading.score_by_authors,
    ),
    Door(
        "answer_templates",
        "answer-rules",
        "scores",
        lambda: {f"{case.rule} {number}": case for number, case in enumerate(template_cases())},
        asdict,
        our_reading.score_by_authors,
    ),
    Door(
        "slime_rules",
        "answer-rules",
        "scores",
        lambda: {f"{rule} {number}": case for rule in SLIME_RULES for number, case in enumerate(slime_cases(rule))},
        asdict,
        our_reading.score_by_authors,
        sources="slime",
    ),
    Door(
        "slime_sympy",
        "answer-rules",
        "scores",
        lambda: {f"{rule} {number}": case for rule in SYMPY_RULES for number, case in enumerate(slime_cases(rule))},
        asdict,
        our_reading.score_by_sympy,
        sources="slime",
    ),
    Door(
        "prime_math",
        "answer-rules",
        "scores",
        lambda: {f"{case.rule} {number}": case for number, case in enumerate(prime_math_cases())},
        asdict,
        our_reading.score_by_sympy,
    ),
    Door(
        "math_library",
        "answer-rules",
        "scores",
        lambda: {f"{LIBRARY} {number}": case for number, case in enumerate(answer_cases(LIBRARY))},
        asdict,
        lambda case: of_whole_response(case.response, {"gold": case.golds[0]}),
    ),
    Door(
        "terminal_screens",
        "pyte",
        "screens",
        screen_cases,
        lambda case: case,
        our_reading.screen,
        (
            (r"^deletions ", "pyte keeps a line that is deleted where there is no other in its place"),
            (r"^halves ", "the half that stays of a wide character is a blank, as in xterm"),
            (r"^long lines ", "a line is as long as it is written: pipes have no width"),
            (r"^more parameters .*: theirs refuses", "pyte breaks on more parameters than a sequence takes"),
            (r"^other sequences ", "pyte reads no `b`, `s`, `u`, `S`, `T`, HPA, NEL, nor alternate screens"),
            (r"^regions ", "scrolling regions are passed over"),
            (r"^strings ", "a title or other string that is not closed ends with its line"),
        ),
    ),
    Door(
        "repeated_turns",
        "openhands",
        "repetitions",
        turn_cases,
        lambda case: case,
        our_reading.repetition,
        (
            (r"^errors .*: theirs [1-9]", "the same call three times with an error, whatever the error says"),
            (r"^outputs .*: theirs [1-9]", "results of commands are compared by command and exit code alone"),
            (r"^thoughts .*, ours [1-9]", "what is written beside a call is compared, too"),
            (r"^(texts|mixed) ", "the same text three times, whatever the user says to it; texts do not alternate"),
            (r"^several ", "calls of a turn are compared one by one"),
        ),
    ),
)


def query_oracle(door: Door) -> dict[str, Any]:
    """Return the results of an oracle's own code, as they are recorded. Skips the test if it is not installed."""
    python = Path(os.environ["FARM_TEST_ORACLES"]) / door.oracle / ".venv" / "bin" / "python"
    if not python.exists():
        absent(f"{door.oracle} is not installed: tests/oracles/environment.sh says why")
    if not (python.parents[2] / door.sources).exists():
        absent(f"the sources of {door.sources} are not there: tests/oracles/environment.sh says why")
    program = PROGRAMS / f"{door.oracle.replace('-', '_')}_oracle.py"
    cases = {name: door.asked(case) for name, case in door.cases().items()}
    text = json.dumps({"variables": our_reading.VARIABLES, "cases": cases})
    done = subprocess.run([python, program, door.question], input=text, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    answers = {name: answer.get("value", REFUSED) for name, answer in json.loads(done.stdout).items()}
    return _compact(answers) if door.compact else answers


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


def compared(door: Door, theirs: Mapping[str, Any]) -> Agreement:
    """Compare an oracle's results with the farm's."""
    cases, result = door.cases(), Agreement()
    ours: dict[str, Any] = {}
    refusals: dict[str, str] = {}
    for name, case in cases.items():
        try:
            ours[name] = door.ours(case)
        except FarmError as error:
            ours[name], refusals[name] = REFUSED, " ".join(str(error).split())
    ours = json.loads(json.dumps(_compact(ours) if door.compact else ours))
    assert list(cases) == list(theirs), "the cases differ from the recorded ones"
    for name in cases:
        if ours[name] == theirs[name]:
            result.refused += ours[name] == REFUSED
            result.alike += ours[name] != REFUSED
            continue
        line = _difference(name, theirs[name], ours[name], refusals.get(name, ""))
        reasons = [reason for pattern, reason in door.known if re.search(pattern, line)]
        if reasons:
            result.known[reasons[0]] += 1
        else:
            result.faults.append(line)
    result.faults += [f"no case differs by {reason!r}" for _, reason in door.known if not result.known[reason]]
    return result


def _difference(name: str, theirs: Any, ours: Any, refusal: str) -> str:
    if ours == REFUSED:
        return f"{name}: ours: {refusal}"
    if theirs == REFUSED:
        return f"{name}: theirs refuses, ours {ours!r}"
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return f"{name}: theirs {theirs!r}, ours {ours!r}"
    parts = [
        f"{key} is {theirs.get(key, USUAL)!r}, ours {ours.get(key, USUAL)!r}"
        for key in {**theirs, **ours}
        if theirs.get(key, USUAL) != ours.get(key, USUAL)
    ]
    return f"{name}: {'; '.join(parts)}"
