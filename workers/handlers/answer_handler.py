"""Requests with a gold answer: mathematics, STEM, multiple choice; scored by rules, then by a judge."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from farm.records.trajectory import Message
from workers.evaluators.answers.authors.multiple_choice import MODES
from workers.evaluators.answers.authors.rules import NAMES, is_readable_gold
from workers.evaluators.answers.equivalence import EquivalenceEvaluator
from workers.evaluators.answers.final_answer import LETTERS, MAX_OPTIONS
from workers.evaluators.answers.judge import AnswerJudge, JudgeSettings
from workers.evaluators.answers.normal_text import balanced
from workers.evaluators.answers.reference import Reference
from workers.plugins.handler import Handler
from workers.plugins.interfaces import NO_MODELS, ChatModel, Evaluator
from workers.row_forms.answer_rows import answer_fields
from workers.row_forms.patterns import sound_pattern

_BOX = "Think step by step, and put your final answer, and only that, in \\boxed{}."
_LETTER = "Think step by step, and put the letter of the right option, and only that, in \\boxed{}."


class AnswerInstance(BaseModel):
    """One problem; a row of DAPO, verl, ProRL, Polaris, DeepScaleR, slime, NeMo Gym, SuperGPQA or WebInstruct.

    With `options`, `gold` is the letter of one. `prompt` is the policy's prompt; empty for the question plus a line on
    the form of the answer. `rule` names the authors' scorer: the score then has the reward `authors`, too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    question: str = Field(min_length=1)
    gold: str = Field(min_length=1, max_length=20_000)
    other_golds: tuple[str, ...] = Field(default=(), max_length=200)
    """Further answers that are equally good."""
    options: tuple[str, ...] = Field(default=(), max_length=MAX_OPTIONS)
    prompt: tuple[dict[str, str], ...] = ()
    rule: str = ""
    pattern: str = ""
    """A regular expression whose last match, or that match's first group, is the final answer."""
    other_patterns: tuple[str, ...] = Field(default=(), max_length=20)
    """Patterns to try in order if the first finds no answer."""
    prefix: str = Field(default="", max_length=200)
    """A text that introduces an answer as `Answer:` does, for the rule `lenient_answer_colon_md`."""
    evaluated: bool | None = None
    """An answer with operations that the gold answer lacks is wrong; by default if the gold answer is a number."""
    judge: JudgeSettings | None = None
    """A judge's rules for answers that rules cannot decide: the batch must define the role."""

    @model_validator(mode="before")
    @classmethod
    def _of_row(cls, row: Any) -> Any:
        return answer_fields(row) if isinstance(row, Mapping) else row

    @field_validator("pattern")
    @classmethod
    def _is_pattern(cls, pattern: str) -> str:
        return sound_pattern(pattern)

    @field_validator("other_patterns")
    @classmethod
    def _are_patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(sound_pattern, patterns))

    @field_validator("rule")
    @classmethod
    def _is_known(cls, rule: str) -> str:
        if rule and rule not in NAMES:
            raise ValueError(f"unknown rule {rule[:40]!r}; known are: {', '.join(NAMES)}")
        return rule

    @model_validator(mode="after")
    def _has_gold_option(self) -> AnswerInstance:
        if self.options and self.gold not in tuple(LETTERS[: len(self.options)]):
            raise ValueError(f"gold is {self.gold[:40]!r}, not the letter of one of {len(self.options)} options")
        if self.rule in MODES and not self.options:
            raise ValueError(f"the rule {self.rule!r} needs options, and there are none")
        if not is_readable_gold(self.rule, self.gold):
            raise ValueError(f"gold is {self.gold[:40]!r}, but the rule {self.rule!r} reads only numbers")
        for gold in (self.gold, *self.other_golds):
            if not balanced(gold):
                raise ValueError(f"gold is {gold[:40]!r}, with unbalanced braces: no answer in a box can equal it")
        return self


class AnswerHandler(Handler[AnswerInstance]):
    """One question and one answer, without tools and without a sandbox."""

    data_source: ClassVar[str] = "answer"
    instance_type: ClassVar[type[BaseModel]] = AnswerInstance
    without_sandbox: ClassVar[bool] = True

    def messages(self) -> list[Message]:
        if self.instance.prompt:
            return [dict(message) for message in self.instance.prompt]
        options = [f"{LETTERS[at]}: {option}" for at, option in enumerate(self.instance.options)]
        content = "\n".join([self.instance.question, *options, "", _LETTER if options else _BOX])
        return [{"role": "user", "content": content}]

    def roles(self) -> Collection[str]:
        return ("judge",) if self.instance.judge is not None and not self.instance.options else ()

    def evaluator(self, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        reference = Reference(
            self.instance.question,
            self.instance.gold,
            self.instance.options,
            pattern=self.instance.pattern,
            evaluated=self.instance.evaluated,
            other_golds=self.instance.other_golds,
            rule=self.instance.rule,
            other_patterns=self.instance.other_patterns,
            prefix=self.instance.prefix,
        )
        rules = self.instance.judge
        judge = AnswerJudge(models["judge"], rules) if rules is not None and self.roles() else None
        return EquivalenceEvaluator(reference, judge)
