"""Episodes of the farm, whose calls are replayed to a trainer's own loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farm.records.request import Instance
from farm.records.trajectory import ModelCall

N = 4
PLAIN, LONG, TOOL, SPACED = "How many hops?", "Count.", "Look twice.", "Look with space."
"""The problems of the scripted engine: one of one turn, one of a long turn, and two of two turns with a tool.

The last begins with a text that some clients do not write as it was sampled: it has two line breaks before the call.
"""


def problem(question: str, engine: str) -> Instance:
    """Return a problem that this engine has a script for."""
    fields = {"question": question, "expected": "three"}
    return Instance(data_source="chat", fields=fields, instance_id=question, engine_url=engine)


class Recording:
    """An LLM that answers as it did in a rollout of the farm.

    `other_prompts` has the prompts that differ from those that the farm sent, each with the farm's.
    """

    def __init__(self, calls: Sequence[ModelCall]) -> None:
        self.calls = list(calls)
        self.other_prompts: list[tuple[list[int], list[int]]] = []
        self.asked: list[dict[str, Any]] = []

    def answer(self, prompt_ids: Sequence[int], sampling: Any = None) -> ModelCall:
        """Return the call that the farm made at this place."""
        call = self.calls[min(len(self.asked), len(self.calls) - 1)]
        self.asked.append(dict(sampling or {}))
        assert call.prompt_ids is not None
        theirs, ours = list(prompt_ids), call.prompt_ids.tolist()
        if theirs != ours:
            self.other_prompts.append((theirs, ours))
        return call

    def observation(self) -> str:
        """Return the reply of the farm's environment after the last call."""
        (message,) = self.calls[len(self.asked) - 1].observations
        return str(message["content"])

    @property
    def faults(self) -> list[str]:
        """Return the differences between its loop and the farm's rollout."""
        found = [f"prompt {theirs} and not {ours}" for theirs, ours in self.other_prompts]
        if len(self.asked) != len(self.calls):
            found.append(f"{len(self.asked)} calls and not {len(self.calls)}")
        return found


def of_two_rewards(compare: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a comparison of a group whose rewards are not all equal, so that it has advantages.

    Raises AssertionError if none of twenty groups is such a one.
    """
    for _ in range(20):
        case = compare()
        if len(set(case["rewards"])) > 1:
            return case
    raise AssertionError("all groups had equal rewards")


def other_sampling(recordings: Sequence[Recording], names: Sequence[str]) -> list[str]:
    """Return the parameters of these names that the trainer's loop sent and the farm did not, call by call."""
    found = []
    for recording in recordings:
        for asked, call in zip(recording.asked, recording.calls, strict=False):
            pairs: Mapping[str, tuple[Any, Any]] = {name: (asked.get(name), call.sampling.get(name)) for name in names}
            found += [f"{name} {theirs} and not {ours}" for name, (theirs, ours) in pairs.items() if theirs != ours]
    return sorted(set(found))


def differing(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return the names of arrays that are not equal, in values, shape and type."""
    import torch  # type: ignore[import-not-found, unused-ignore]

    found = [f"only one has {name}" for name in ours.keys() ^ theirs.keys()]
    for name in ours.keys() & theirs.keys():
        one, other = ours[name], theirs[name]
        same = torch.equal(one, other) and one.dtype == other.dtype if isinstance(one, torch.Tensor) else one == other
        if not same:
            found.append(name)
    return sorted(found)
