"""A curriculum: leaves out instances that the run always or never solves, for a while."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from farm.client.farm import Farm
from farm.collecting.instance_samplers import InstanceSampler, SamplerState
from farm.errors import InvalidRequest
from farm.records.request import Instance
from farm.records.training_run import SolveRate, check_run
from farm.records.trajectory import NO_VERSION, version_number


class Curriculum:
    """The instances of a sampler without those that the run solved too often or too seldom, as counted by the store.

    An instance is left out if at least `min_scored` of its rollouts were scored, with a solve rate of at least
    `easy_threshold` or at most `hard_threshold` (prime-rl's names); solved is a reward of at least `solved_at`. Only
    rollouts of the last `last_versions` weight versions count, so an instance comes back after that time; without
    `last_versions`, or if weights have no numbers, it is left out for good.

    Raises InvalidRequest if nothing is left: two epochs in a row without an instance.
    """

    def __init__(
        self,
        sampler: InstanceSampler,
        client: Farm,
        run: str,
        *,
        easy_threshold: float = 1.0,
        hard_threshold: float = 0.0,
        min_scored: int = 1,
        last_versions: int | None = None,
        solved_at: float = 1.0,
    ) -> None:
        check_run(run)
        if not 0.0 <= hard_threshold < easy_threshold <= 1.0:
            raise InvalidRequest(
                f"0 <= hard_threshold < easy_threshold <= 1 must hold, not {hard_threshold} and {easy_threshold}",
                field="easy_threshold",
            )
        for name, value in (("min_scored", min_scored), ("last_versions", last_versions)):
            if value is not None and value < 1:
                raise InvalidRequest(f"must be at least 1, not {value}", field=name)
        self._sampler = sampler
        self._client = client
        self._run = run
        self._easy, self._hard = easy_threshold, hard_threshold
        self._min_scored = min_scored
        self._last_versions = last_versions
        self._solved_at = solved_at

    def __len__(self) -> int:
        return len(self._sampler)

    def draw(self, n: int, state: SamplerState) -> tuple[list[Instance], SamplerState]:
        if state and not {"skipped", "of"} <= state.keys():
            raise InvalidRequest("the run was started with another sampler; use a new run name", field="sampler")
        inner, n_skipped, in_a_row = state.get("of", {}), state.get("skipped", 0), 0
        drawn: list[Instance] = []
        while len(drawn) < n:
            some, inner = self._sampler.draw(n - len(drawn), inner)
            taken = self._without_easy_and_hard(some)
            n_skipped += len(some) - len(taken)
            in_a_row = 0 if taken else in_a_row + len(some)
            drawn += taken
            if in_a_row > 2 * len(self):
                raise InvalidRequest(
                    f"all {len(self)} instances of run {self._run} are solved at a rate of {self._easy:g} or more, or "
                    f"of {self._hard:g} or less: widen easy_threshold and hard_threshold, or add other instances",
                    field="easy_threshold",
                )
        return drawn, {"skipped": n_skipped, "of": inner}

    def _without_easy_and_hard(self, instances: Sequence[Instance]) -> list[Instance]:
        by_source: defaultdict[str, list[str]] = defaultdict(list)
        for instance in instances:
            by_source[instance.data_source].append(instance.instance_id)
        min_version = self._min_version()
        left_out = {
            (source, each.instance_id)
            for source, ids in by_source.items()
            for each in self._client.runs.solve_rates(
                self._run, source, ids, min_version=min_version, solved_at=self._solved_at
            )
            if self._leaves_out(each)
        }
        return [each for each in instances if (each.data_source, each.instance_id) not in left_out]

    def _min_version(self) -> int | None:
        if self._last_versions is None:
            return None
        newest = version_number(self._client.newest_version())
        return None if newest == NO_VERSION else newest - self._last_versions + 1

    def _leaves_out(self, solved: SolveRate) -> bool:
        return solved.n_scored >= self._min_scored and not self._hard < solved.rate < self._easy
