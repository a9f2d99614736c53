"""Scripted problems with known rewards for each sample.

A batch is derived from its number, so a client that replaces a killed one submits exactly the same request.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from examples.problems import humaneval_problems, math_problems
from examples.scripts import example_script
from farm.records.request import BatchRequest, Instance, Limits, SamplingParams
from farm.records.trajectory import Message
from farm.seeds import call_seed, rollout_seed
from workers.evaluators.answer import extract_answer
from workers.testing.hermes_text import message_of
from workers.testing.scripted_model import Branch, Script, ScriptedProblem

FAMILIES = ("gcd", "simple_equations", "chain_sum")
PER_FAMILY = 6
N_CODE = 12
_LIMITS = Limits(run_s=600.0, init_s=300.0, eval_s=300.0, tool_s=120.0)
"""Long enough that no rollout ends by a deadline: on a loaded machine that would be a legitimate zero."""


@cache
def instances() -> list[Instance]:
    """Return all instances for batches except empty rollouts. Takes a second."""
    return [*math_problems(FAMILIES, PER_FAMILY, seed=5), *humaneval_problems(N_CODE)]


@cache
def script() -> list[ScriptedProblem]:
    """Return their scripts, for the engine."""
    return example_script(instances(), seed=5)


def noop(seconds: float) -> Instance:
    """Return a rollout without sandbox and engine."""
    return Instance(data_source="noop", fields={"seconds": seconds}, instance_id=f"noop-{seconds:g}")


def write(path: Path) -> None:
    """Write all instances for clients: making them takes a second and a hundred megabytes per process."""
    path.write_text("".join(f"{instance.model_dump_json()}\n" for instance in instances()))


def read(path: Path) -> list[Instance]:
    """Read the instances that `write` wrote."""
    return [Instance.model_validate_json(line) for line in path.read_text().splitlines()]


def request(seed: int, client: str, number: int, known: Sequence[Instance]) -> BatchRequest:
    """Return the n-th batch of a client."""
    chance = random.Random(f"{seed}/{client}/{number}")
    chosen = chance.sample(known, chance.randint(2, 4))
    chosen += [noop(chance.choice((0.0, 0.5, 2.0, 5.0))) for _ in range(chance.randint(1, 2))]
    chance.shuffle(chosen)
    return BatchRequest(
        instances=tuple(chosen),
        n_samples=chance.choice((2, 3, 4)),
        sampling=SamplingParams(seed=chance.randrange(1_000_000)),
        limits=_LIMITS,
        priority=chance.choice((0, 0, 0, 10)),
        max_attempts=20,
        max_losses=100,
        idempotency_key=f"chaos-{seed}-{client}-{number}",
        metadata={"client": client, "number": number},
    )


class ExpectedScore:
    """The expected score of each sample. `seed` is the engine's."""

    def __init__(self, seed: int) -> None:
        self._script = Script(script(), seed)
        self._problems = {
            instance.instance_id: problem for instance, problem in zip(instances(), script(), strict=True)
        }
        self._instances = {instance.instance_id: instance for instance in instances()}
        self._known: dict[tuple[str, str], float] = {}

    def reward(self, instance_id: str, sampling_seed: int, group_index: int, sample_index: int) -> float:
        """Return the only right score of one sample."""
        if instance_id.startswith("noop"):
            return 1.0
        instance, problem = self._instances[instance_id], self._problems[instance_id]
        seed = rollout_seed(sampling_seed, instance.data_source, instance.fields, group_index, sample_index)
        branch = self._selected_script(problem, seed)
        key = instance_id, branch.name
        if key not in self._known:
            self._known[key] = _worth(instance, branch)
        return self._known[key]

    def _selected_script(self, problem: ScriptedProblem, seed: int) -> Branch:
        """Return the script selected by the draws of all calls: some scripts begin alike."""
        messages: list[Message] = [{"role": "user", "content": problem.match}]
        left = list(problem.branches)
        for number in count():
            turn = self._script.next_turn(messages, call_seed(seed, number))
            messages.append(message_of(turn.text))
            left = [branch for branch in left if branch.turn(number).matches(messages[-1])]
            if len(left) == 1 or not turn.tool_calls:
                return left[0]
        raise AssertionError("a scripted rollout ends")


def _worth(instance: Instance, branch: Branch) -> float:
    if instance.data_source == "code":
        return float(branch.name.endswith("reference"))
    # imported here, as it takes a second
    import reasoning_gym

    entry: dict[str, Any] = {name: instance.fields[name] for name in ("question", "answer", "metadata")}
    return float(reasoning_gym.get_score_answer_fn(instance.fields["family"])(_answer(branch), entry))


def _answer(branch: Branch) -> str:
    last = branch.turns[-1]
    if last.tool_calls:
        arguments = last.tool_calls[0].arguments
        assert isinstance(arguments, dict)
        return extract_answer(str(arguments["answer"]))
    return extract_answer(last.content)
