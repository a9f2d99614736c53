"""An OpenEnv environment: count up to a number, in steps of any size; reaching the number is rewarded."""

from __future__ import annotations

from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class CounterAction(Action):
    """Add a number to the counter."""

    add: int


class CounterObservation(Observation):
    """The counter, and the number to reach."""

    count: int
    goal: int


class CountUp(Environment):
    """A counter with a goal; beyond the goal the episode ends without a reward."""

    def __init__(self, goal: int = 3) -> None:
        super().__init__()
        self._goal = goal
        self._count = 0

    def reset(self, seed: int | None = None, start: int = 0, **more: Any) -> CounterObservation:
        self._count = start
        return CounterObservation(count=self._count, goal=self._goal)

    def step(self, action: CounterAction, **more: Any) -> CounterObservation:
        self._count += action.add
        reward = float(self._count == self._goal)
        done = self._count >= self._goal
        return CounterObservation(count=self._count, goal=self._goal, reward=reward, done=done)

    @property
    def state(self) -> State:
        return State(step_count=self._count)
