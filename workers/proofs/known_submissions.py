"""The proofs of all scorers that the farm brings, with their known submissions.

Answers are chosen so that the library behind a scorer has to decide: no rule of the farm's own can tell
`(a+b)^2` from `a^2+2ab+b^2`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from farm.errors import EvaluatorError
from farm.records.request import SamplingParams, SandboxSpec
from farm.records.trajectory import Completion, Message
from workers.config import own_config
from workers.environments.environment import Action, Episode
from workers.environments.environment_program import EnvironmentProgram, environment_program
from workers.environments.environment_servers import EnvironmentServers
from workers.evaluators.answer import verified
from workers.evaluators.answers.equivalence import EquivalenceEvaluator
from workers.evaluators.answers.judge import AnswerJudge, JudgeSettings
from workers.evaluators.answers.reference import Reference
from workers.evaluators.issues.issue import START, TREE, Issue, log_of
from workers.evaluators.issues.library import SWEBENCH, UNIDIFF, grade
from workers.evaluators.patches import patch_files
from workers.evaluators.programs import SOLUTION
from workers.evaluators.tests import PytestEvaluator, TestPlan
from workers.handlers.harbor.harbor_verifier import Tests, verify
from workers.handlers.harbor.reward_files import MAIN
from workers.plugins import registry
from workers.plugins.interfaces import Evaluator, Sandbox, Submission
from workers.proofs.known_environment import RIGHT, WRONG, KnownEnvironment
from workers.proofs.proof import Known, NotProvable, Proof, best_provider, fresh_of
from workers.sandboxes.images.archives import is_unpacked
from workers.sandboxes.images.environments import is_made

_EVAL_S = 200.0
"""Seconds of scoring time: a share of it is what one run of a submission may take."""
_STEP_S = 60.0
_FETCHED = "its first rollout on this node, or `python -m workers.proofs --fetch`, fetches"
_STREAM: Mapping[str, Any] = {"tests": [{"stdin": "2 3\n", "expected": "5\n"}]}
_CALL: Mapping[str, Any] = {"tests": [{"arguments": [2, 3], "expected": [5]}], "function": "add"}
_CHECKER: Mapping[str, Any] = {
    **_STREAM,
    "compare": "checker",
    "checker": "import json, sys\nd = json.load(sys.stdin)\nsys.exit(int(d['output']) != int(d['expected']))\n",
}
_PACKAGES = ("pytest==8.3.5", "pytest-timeout==2.3.1")
_PROJECT = "/workspace"
_TEST_PATCH = """diff --git a/tests/test_calc.py b/tests/test_calc.py
new file mode 100644
--- /dev/null
+++ b/tests/test_calc.py
@@ -0,0 +1,5 @@
+from calc import add
+
+
+def test_add():
+    assert add(2, 3) == 5
"""
_PATCH = """diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a {sign} b
"""
_TEST_SH = """#!/bin/bash
if [ "$(cat /workspace/answer.txt)" = 42 ]; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
"""


def proofs(*, fetch: bool = False) -> list[Proof]:
    """Return the proof of each scorer, those first that take the longest.

    Those whose packages are not on this node are not provable, unless they may `fetch` them.
    """
    return [
        Proof("swe", partial(_swe, fetch)),
        Proof("environment reasoning_gym", partial(_reasoning_gym, fetch)),
        Proof("math", _math),
        Proof("answer", _answer),
        Proof("environment", _environment),
        Proof("code", _code),
        Proof("programs", partial(_programs, _STREAM)),
        Proof("programs (function)", partial(_programs, _CALL)),
        Proof("programs (checker)", partial(_programs, _CHECKER)),
        Proof("harbor", _harbor),
        Proof("swe-bench", partial(_swe_bench, fetch)),
        Proof("answer (judge)", _judge),
    ]


async def _score(evaluator: Evaluator, submission: Submission, spec: SandboxSpec | None = None) -> float:
    score = await evaluator.evaluate(submission, fresh_of(spec or SandboxSpec()), _EVAL_S)
    assert score.value is not None
    return score.value


async def _handled(data_source: str, fields: Mapping[str, Any], submission: Submission) -> float:
    kind = registry.handler(data_source)
    handler = kind(kind.instance_type.model_validate(dict(fields)))
    return await _score(handler.evaluator(), submission, handler.sandbox())


async def _math(known: Known) -> float:
    fields = {
        "family": "simple_integration",
        "question": "Calculate the indefinite integral of 2*x.",
        "answer": "x**2 + C",
        "metadata": {"integrand": "2*x", "variable": "x", "expected_answer_expression": "x**2"},
    }
    return await _handled("math", fields, Submission(answer={"right": "x**2 + 3 + C", "wrong": "x**3 + C"}[known]))


async def _answer(known: Known) -> float:
    answer = {"right": "(a+b)^2", "wrong": "(a-b)^2"}[known]
    fields = {"question": "Expand or factor.", "gold": "a^2+2ab+b^2"}
    return await _handled("answer", fields, Submission(answer=f"\\boxed{{{answer}}}"))


class _KnownJudge:
    """A judge that decides by the candidate's words: it stands in for an LLM, as what is proven is how it is read."""

    model = "a known judge"
    blocked = ""

    async def answer(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], sampling: SamplingParams
    ) -> Completion:
        text = await self.complete(messages, sampling)
        response = {"role": "assistant", "content": text}
        return Completion(
            finish_reason="stop", response=response, engine="", n_prompt_tokens=0, n_response_tokens=len(text)
        )

    async def complete(self, messages: Sequence[Message], sampling: SamplingParams) -> str:
        is_right = "capital of France" in str(messages[-1]["content"]).partition("Candidate:")[2]
        return f"They are compared. \\boxed{{{'YES' if is_right else 'NO'}}}"


async def _judge(known: Known) -> float:
    answer = {"right": "the capital of France", "wrong": "the capital of Spain"}[known]
    evaluator = EquivalenceEvaluator(Reference("Name a city.", "Paris"), AnswerJudge(_KnownJudge(), JudgeSettings()))
    return await _score(evaluator, Submission(answer=f"\\boxed{{{answer}}}"))


async def _code(known: Known) -> float:
    fields = {
        "task_id": "proof",
        "prompt": "def double(x):\n    '''Return x twice.'''\n",
        "entry_point": "double",
        "test": "def check(candidate):\n    assert candidate(4) == 8\n    assert candidate('a') == 'aa'\n",
    }
    factor = {"right": 2, "wrong": 3}[known]
    files = {SOLUTION: f"def double(x):\n    return {factor} * x\n"}
    return await _handled("code", fields, Submission(files=files))


async def _programs(tests: Mapping[str, Any], known: Known) -> float:
    sign = {"right": "+", "wrong": "-"}[known]
    program = f"def add(a, b):\n    return a {sign} b\n"
    if "function" not in tests:
        program += "print(add(*map(int, input().split())))\n"
    return await _handled("programs", {"question": "Add.", **tests}, Submission(files={SOLUTION: program}))


async def _put_project(sandbox: Sandbox) -> None:
    await sandbox.write_file(f"{_PROJECT}/calc.py", b"def add(a, b):\n    return a - b\n")


async def _swe(fetch: bool, known: Known) -> float:
    if not fetch and not is_made(own_config().sandboxes, _PACKAGES):
        raise NotProvable(f"{_FETCHED} {', '.join(_PACKAGES)}")
    plan = TestPlan(
        command="python -m pytest -q -p no:cacheprovider tests/test_calc.py",
        tree=_PROJECT,
        pythonpath=".",
        test_patch=_TEST_PATCH,
        fail_to_pass=["tests/test_calc.py::test_add"],
        pass_to_pass=[],
    )
    patch = _PATCH.format(sign={"right": "+", "wrong": "*"}[known]).encode()
    fresh = fresh_of(SandboxSpec(packages=_PACKAGES, workdir=_PROJECT), _put_project)
    return (await PytestEvaluator(plan).evaluate(Submission(files=patch_files(patch)), fresh, _EVAL_S)).value or 0.0


async def _swe_bench(fetch: bool, known: Known) -> float:
    absent = [archive.name for archive in (SWEBENCH, UNIDIFF) if not is_unpacked(own_config().sandboxes, archive)]
    if absent and not fetch:
        raise NotProvable(f"{_FETCHED} {', '.join(absent)}")
    issue = Issue(
        instance_id="proof__proof-1",
        data_set="swe-bench",
        repo="proof/proof",
        tree=TREE,
        base_commit="",
        eval_script="",
        log_parser="",
        eval_type="pass_and_fail",
        fail_to_pass=("test_calc.py::test_add",),
        pass_to_pass=("test_calc.py::test_keep",),
    )
    word, code = {"right": ("PASSED", 0), "wrong": ("FAILED", 1)}[known]
    log = log_of(f"{START}\n{word} test_calc.py::test_add\nPASSED test_calc.py::test_keep\n", code)
    graded = await grade(own_config().sandboxes, issue, log)
    if not graded.complete:
        raise EvaluatorError("the swebench library finds no results in a log that has some")
    return float(graded.resolved)


@contextmanager
def _known_tests() -> Iterator[Path]:
    with TemporaryDirectory(prefix="farm-proof-") as folder:
        Path(folder, "test.sh").write_text(_TEST_SH)
        yield Path(folder)


async def _harbor(known: Known) -> float:
    answer = {"right": b"42\n", "wrong": b"43\n"}[known]
    with _known_tests() as folder:
        async with fresh_of(SandboxSpec())() as sandbox:
            await sandbox.write_file("/workspace/answer.txt", answer)
            verdict = await verify(sandbox, Tests([folder], {}, _STEP_S), "a known task")
    return verdict.rewards[MAIN]


async def _environment(known: Known) -> float:
    program = EnvironmentProgram.of("known", KnownEnvironment)
    return await _episode_reward(program, Episode(), {"right": RIGHT, "wrong": WRONG}[known])


async def _reasoning_gym(fetch: bool, known: Known) -> float:
    program = environment_program("reasoning_gym")
    if not fetch and not is_made(
        own_config().sandboxes, program.packages, without_dependencies=program.without_dependencies
    ):
        raise NotProvable(f"{_FETCHED} {program.packages[0]}")
    return await _episode_reward(
        program, Episode(id="gcd", seed=1), None if known == "right" else "<answer>none</answer>"
    )


async def _episode_reward(program: EnvironmentProgram, episode: Episode, text: str | None) -> float:
    """Return the reward of one step; without a text, of the reference solution."""
    servers = EnvironmentServers()
    try:
        connection = await servers.connect(program, best_provider(), ())
        connection.rewards = program.rewards
        connection.verify = partial(verified, timeout_s=_STEP_S)
        try:
            await connection.reset(episode, _STEP_S)
            if text is None and (text := await connection.reference(_STEP_S)) is None:
                raise EvaluatorError(f"environment {program.name} has no reference solution")
            return (await connection.step(Action(text), _STEP_S)).reward
        finally:
            connection.drop()
    finally:
        await servers.aclose()
