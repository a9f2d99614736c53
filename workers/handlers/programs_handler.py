"""Programs for hidden tests, of standard input and output or of one function; from rows of well-known data sets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from farm.errors import HandlerError, ToolError
from farm.records.request import SandboxSpec
from farm.records.sandbox_spec import Requirement
from farm.records.trajectory import Message
from workers.evaluators.program_tests.evaluator import (
    AUTHORS_SOLUTION,
    SOLUTION,
    AssertsEvaluator,
    ProgramTestsEvaluator,
)
from workers.evaluators.program_tests.form_rules import CallTest, HiddenTests, StreamTest, form_rule
from workers.evaluators.program_tests.output_comparison import FORM, tolerance_of
from workers.plugins.handler import Handler
from workers.plugins.interfaces import NO_MODELS, ChatModel, Evaluator, Sandbox, Submission
from workers.row_forms.fenced_blocks import AUTHORS_PROGRAM, fenced_program
from workers.row_forms.program_rows import program_fields

_PATH = f"/workspace/{SOLUTION}"
_MAX_BYTES = 1_000_000
_MAX_TESTS = 5_000
_SYSTEM = (
    f"Solve the problem with a Python program. Write it to {_PATH}, try it with the tools and call submit; or answer "
    "with the whole program in one ```python block. Hidden tests run it."
)
_STREAMS = "The program reads standard input and writes to standard output."


class ProgramTest(BaseModel):
    """One test: `stdin` and the `expected` output; or `arguments` and the values that a call may return."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stdin: str | None = None
    arguments: tuple[Any, ...] | None = None
    expected: str | tuple[Any, ...]

    @model_validator(mode="after")
    def _of_one_kind(self) -> ProgramTest:
        if (self.stdin is None) == (self.arguments is None):
            raise ValueError("a test has either `stdin` or `arguments`")
        if isinstance(self.expected, str) != (self.stdin is not None):
            raise ValueError("`expected` must be a text with `stdin`, and a list of values with `arguments`")
        return self

    def hidden(self) -> StreamTest | CallTest:
        """Return the test for the evaluator."""
        if self.stdin is not None:
            assert isinstance(self.expected, str)
            return StreamTest(self.stdin, self.expected)
        assert self.arguments is not None
        return CallTest(self.arguments, self.expected)


class ProgramsInstance(BaseModel):
    """One problem; a row of LiveCodeBench, APPS, TACO, CodeContests, MBPP, EvalPlus, verl or NeMo Gym.

    Its tests are `tests`, or `asserts` that call `function`. Expected results are never shown, and never in the sandbox
    in which a program is tested.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    question: str = Field(min_length=1)
    prompt: tuple[dict[str, str], ...] = ()
    starter_code: str = ""
    tests: Annotated[tuple[ProgramTest, ...], Field(max_length=_MAX_TESTS)] = ()
    asserts: Annotated[tuple[str, ...], Field(max_length=_MAX_TESTS)] = ()
    setup: str = ""
    """Source that runs before the asserts."""
    function: str = Field(default="", pattern=r"^([A-Za-z_]\w*)?$")
    """The function to call: a method of `Solution`, or one of the module."""
    reference: str = ""
    """A program that computes the expected values, for tests that have none."""
    compare: str = "lines"
    """`lines`, `tokens`, `float:EPS`, `checker`, or `form`, for rows with a `rule`; for values only `float:EPS`
    and `form` matter."""
    rule: str = ""
    """The authors' scoring rule for the row's form: `livecodebench`, `skyrl_lcb`, `nemo_gym`, `prime_code`, `apps`,
    `taco`, `codecontests` or `evalplus:DATASET:ATOL`. Such a row has the rewards `farm` and `authors`."""
    checker: str = ""
    """A Python program that gets `{input, output, expected}` as JSON and accepts an output by exit code 0."""
    partial: bool = False
    """True: the score is the share of passed tests. Otherwise all must pass, and the first failure ends the tests."""
    time_s: Annotated[float, Field(gt=0, le=600)] = 6.0
    """CPU seconds of one test."""
    memory_mb: Annotated[int, Field(ge=64, le=65_536)] = 1024
    packages: tuple[Requirement, ...] = ()
    """Exact requirements, such as `numpy==2.3.5`, that the policy and its program can import."""

    @model_validator(mode="before")
    @classmethod
    def _of_row(cls, row: Any) -> Any:
        return program_fields(row) if isinstance(row, Mapping) else row

    @field_validator("compare")
    @classmethod
    def _is_mode(cls, compare: str) -> str:
        tolerance_of(compare)
        return compare

    @field_validator("rule")
    @classmethod
    def _is_rule(cls, rule: str) -> str:
        if rule:
            form_rule(rule)
        return rule

    @model_validator(mode="after")
    def _has_tests(self) -> ProgramsInstance:
        if bool(self.tests) == bool(self.asserts):
            raise ValueError("give either `tests` or `asserts`")
        calls = {test.arguments is not None for test in self.tests}
        if len(calls) == 2 or ((True in calls or self.asserts) and not self.function):
            raise ValueError("tests with `arguments` need a `function`, and cannot be mixed with tests with `stdin`")
        if self.compare == FORM and not self.rule:
            raise ValueError("compare: form needs the `rule` of a form")
        if (self.compare == "checker") != bool(self.checker) or (self.checker and True in calls):
            raise ValueError("compare: checker needs a `checker`, for tests with `stdin`")
        if True in calls and not self.reference and any(not test.expected for test in self.tests):
            raise ValueError("a test with `arguments` and without `expected` values needs a `reference`")
        return self


class ProgramsHandler(Handler[ProgramsInstance]):
    """The policy writes and tests a program, or answers with one; the tests run elsewhere, on the program only."""

    data_source: ClassVar[str] = "programs"
    instance_type: ClassVar[type[BaseModel]] = ProgramsInstance
    tools: ClassVar[Collection[str]] = ("bash", "edit", "python", "submit")

    def sandbox(self) -> SandboxSpec | None:
        return SandboxSpec(packages=self.instance.packages)

    def messages(self) -> list[Message]:
        if self.instance.prompt:
            return [{"role": "system", "content": _SYSTEM}, *(dict(message) for message in self.instance.prompt)]
        parts = [
            self.instance.question,
            _STREAMS if not self.instance.function else f"Define `{self.instance.function}`.",
        ]
        if self.instance.starter_code:
            parts.append(f"Begin with this:\n\n```python\n{self.instance.starter_code}\n```")
        return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": "\n\n".join(parts)}]

    async def collect(self, sandbox: Sandbox | None, answer: str | None) -> Submission:
        """Return the file as a submission, or else the answer's fenced block with the program."""
        if sandbox is None:
            raise HandlerError("the file to score is in a sandbox, and there is none")
        try:
            files = {SOLUTION: await sandbox.read_file(_PATH)}
        except ToolError:
            files = _programs_of(answer or "", self.instance)
        files = {name: data for name, data in files.items() if len(data) <= _MAX_BYTES}
        if not any(files.values()):
            return Submission(answer=answer)
        # Databases accept neither NUL nor incomplete characters.
        return Submission(
            answer=answer,
            files={name: data.decode("utf-8", "replace").replace("\0", "\ufffd") for name, data in files.items()},
        )

    def evaluator(self, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        if self.instance.asserts:
            body = "\n".join(f"    {line}" for text in self.instance.asserts for line in text.strip().splitlines())
            return AssertsEvaluator(self.instance.setup, f"def check(candidate):\n{body}\n", self.instance.function)
        tests = HiddenTests(
            tuple(test.hidden() for test in self.instance.tests),
            function=self.instance.function,
            compare=self.instance.compare,
            checker=self.instance.checker,
            rule=self.instance.rule,
            partial=self.instance.partial,
            time_s=self.instance.time_s,
            memory_mb=self.instance.memory_mb,
        )
        return ProgramTestsEvaluator(tests, self.instance.reference)


def _programs_of(answer: str, instance: ProgramsInstance) -> dict[str, bytes]:
    """Return the program in an answer, and the one that the row's authors extract if it differs."""
    program = fenced_program(answer, instance.function)
    extract = AUTHORS_PROGRAM.get(instance.rule.partition(":")[0])
    authors_program = extract(answer, instance.function) if extract else program
    # If no block contains one, the authors' reading is the only one.
    program = program or authors_program
    # Space before the first word matters in Python.
    alike = program.strip("\r\n").rstrip() == authors_program.strip("\r\n").rstrip()
    files = {SOLUTION: program} if alike else {SOLUTION: program, AUTHORS_SOLUTION: authors_program}
    return {name: text.encode("utf-8", "replace") for name, text in files.items()}
