"""What is played, and what it is worth: problems whose plays are scripted, so that each sample's reward is known.

A batch is made from its number alone: a client that takes over from a dead one asks for the very same thing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from examples.plays import play_book
from examples.problems import humaneval_problems, math_problems
from farm.request import BatchRequest, Instance, Limits, SamplingParams
from workers.evaluators.answer import extract_answer
from workers.testing.book import Play, PlayBook, Problem

FAMILIES = ("gcd", "simple_equations", "chain_sum")
PER_FAMILY = 6
N_CODE = 12
_LIMITS = Limits(run_s=600.0, init_s=300.0, eval_s=300.0, tool_s=120.0)
"""So long that a deadline is no way out: on a loaded machine a rollout that ends by one would be an honest zero."""


@cache
def instances() -> list[Instance]:
    """All that a batch may be made of, but for empty rollouts. Takes a second."""
    return [*math_problems(FAMILIES, PER_FAMILY, seed=5), *humaneval_problems(N_CODE)]


@cache
def book() -> list[Problem]:
    """The scripts of them, for the engine."""
    return play_book(instances(), seed=5)


def noop(seconds: float) -> Instance:
    """A rollout without sandbox and engine."""
    return Instance(data_source="noop", fields={"seconds": seconds}, instance_id=f"noop-{seconds:g}")


def write(path: Path) -> None:
    """All instances, for clients: making them costs a process a second and a hundred megabytes."""
    path.write_text("".join(f"{instance.model_dump_json()}\n" for instance in instances()))


def read(path: Path) -> list[Instance]:
    """What `write` wrote."""
    return [Instance.model_validate_json(line) for line in path.read_text().splitlines()]


def request(seed: int, client: str, number: int, known: Sequence[Instance]) -> BatchRequest:
    """The batch that a client submits as its n-th."""
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


class Worth:
    """What each sample must be scored with. `seed` is the engine's."""

    def __init__(self, seed: int) -> None:
        self._book = PlayBook(book(), seed)
        self._problems = {instance.instance_id: problem for instance, problem in zip(instances(), book(), strict=True)}
        self._instances = {instance.instance_id: instance for instance in instances()}
        self._known: dict[tuple[str, str], float] = {}

    def reward(self, instance_id: str, sampling_seed: int, sample_index: int) -> float:
        """The only right score of one sample."""
        if instance_id.startswith("noop"):
            return 1.0
        problem = self._problems[instance_id]
        asked = [{"role": "user", "content": problem.match}]
        name = self._book.next_play(asked, sampling_seed + sample_index)
        play = next(play for play in problem.plays if play.name == name)
        key = instance_id, name
        if key not in self._known:
            self._known[key] = _worth(self._instances[instance_id], play)
        return self._known[key]


def _worth(instance: Instance, play: Play) -> float:
    if instance.data_source == "code":
        return float(play.name.endswith("reference"))
    # imported late: it takes a second
    import reasoning_gym

    entry: dict[str, Any] = {name: instance.fields[name] for name in ("question", "answer", "metadata")}
    return float(reasoning_gym.get_score_answer_fn(instance.fields["family"])(_answer(play), entry))


def _answer(play: Play) -> str:
    last = play.turns[-1]
    if last.tool_calls:
        arguments = last.tool_calls[0].arguments
        assert isinstance(arguments, dict)
        return extract_answer(str(arguments["answer"]))
    return extract_answer(last.content)
