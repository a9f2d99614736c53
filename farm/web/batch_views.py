"""Views of batches: the list, a running batch, its rollouts, its failures, its figures.

The data of its charts are histograms and means over time; templates draw them.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from farm.api.endpoints import Endpoints
from farm.client.request_checks import invalid
from farm.records.rollout import POLICY_OUTCOMES, BatchStatus, BatchSummary, Outcome, State
from farm.records.trajectory import NO_VERSION, version_number
from farm.store import batches
from farm.store.access.sealed_secrets import shown_request
from farm.store.reports import rollout_costs, rollout_table
from farm.store.reports.rollout_costs import NEWEST_OF_CHART, EndedNumbers, last_ends, newest_ended
from farm.store.reports.rollout_table import EVERY, RolloutFilter
from farm.web.live_updates import LiveUpdates, SharedResults
from farm.web.rendering import html, page, rendered
from farm.web.selection import REASONS, BatchSelection, selection

N_BINS = 20
_N_POINTS = 60
_POLICYS = {outcome.value for outcome in POLICY_OUTCOMES}

N_BATCHES = 50
N_ROLLOUTS = 50
_FIGURES_S = 15.0
"""Seconds for which pages that read thousands of rollouts are kept for all viewers."""
_PageMaker = Callable[[str, dict[str, Any]], Awaitable[str]]
"""A method that renders a page of a batch for a filter."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a histogram: the count of values in [low, high), for the last bar in [low, high]."""

    low: float
    high: float
    n: int
    share: float
    """Its height, as a part of the highest bar."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """A distribution in bars, with its mean and median."""

    title: str
    bars: Sequence[Bar]
    n: int
    mean: float
    median: float


def histogram(title: str, values: Sequence[float]) -> Histogram | None:
    """Return the histogram of finite values; None without any. If there are few different values, each gets a bar."""
    if not values:
        return None
    array = np.asarray(values, dtype=np.float64)
    low, high = float(array.min()), float(array.max())
    distinct = np.unique(array)
    if len(distinct) <= N_BINS // 2:
        counts = [(float(value), float(value), int((array == value).sum())) for value in distinct]
    else:
        numbers, edges = np.histogram(array, bins=N_BINS, range=(low, high))
        counts = [(float(edges[at]), float(edges[at + 1]), int(n)) for at, n in enumerate(numbers)]
    highest = max(n for _, _, n in counts)
    bars = [Bar(first, last, n, n / highest) for first, last, n in counts]
    return Histogram(title, bars, len(values), float(array.mean()), float(np.median(array)))


@dataclass(frozen=True, slots=True)
class SourceFigures:
    """The charts of one data source of a batch."""

    data_source: str
    n: int
    mean_reward: float | None
    histograms: Sequence[Histogram]


@dataclass(frozen=True, slots=True)
class Figures:
    """The charts of the newest ended rollouts of a batch.

    `outcomes` are counts by outcome. `groups_equal` of `groups_whole` have the same reward for all samples, and so no
    gradient. `lags` are weight versions between the oldest token of a rollout and the newest weights. `times` and
    `rewards` are one line over time: seconds since the epoch, and the mean reward of the rollouts that ended then.
    """

    n: int
    sources: Sequence[SourceFigures]
    outcomes: Sequence[tuple[str, int, bool]]
    groups_whole: int
    groups_equal: int
    lags: Histogram | None
    n_stale: int
    n_restarts: int
    times: Sequence[float]
    rewards: Sequence[float]


def figures(numbers: Sequence[EndedNumbers], n_samples: int, newest_version: str = "") -> Figures:
    """Return the charts of some rollouts."""
    by_source: defaultdict[str, list[EndedNumbers]] = defaultdict(list)
    for each in numbers:
        by_source[each.data_source].append(each)
    outcomes = Counter(each.outcome for each in numbers)
    whole, equal = _groups(numbers, n_samples)
    times, rewards = _over_time(numbers)
    now = version_number(newest_version)
    lags = [float(now - each.version_min) for each in numbers if each.version_min is not None and now != NO_VERSION]
    return Figures(
        len(numbers),
        [_source(name, rows) for name, rows in sorted(by_source.items())],
        [(name, n, name in _POLICYS) for name, n in outcomes.most_common()],
        whole,
        equal,
        histogram("versions behind", [max(0.0, lag) for lag in lags]),
        outcomes.get("stale", 0),
        sum(each.n_restarts for each in numbers),
        times,
        rewards,
    )


def _source(name: str, rows: Sequence[EndedNumbers]) -> SourceFigures:
    scored = [each.reward for each in rows if each.reward is not None]
    with_turns = [each for each in rows if each.n_turns]
    histograms = (
        histogram("reward", scored),
        histogram("turns", [float(each.n_turns) for each in with_turns]),
        histogram("sampled tokens", [float(each.n_tokens) for each in with_turns]),
        histogram("seconds", [each.finished_at - each.submitted_at for each in rows]),
    )
    mean = sum(scored) / len(scored) if scored else None
    return SourceFigures(name, len(rows), mean, [each for each in histograms if each is not None])


def _groups(numbers: Sequence[EndedNumbers], n_samples: int) -> tuple[int, int]:
    """Return the number of completely scored groups, and how many of them have equal rewards."""
    rewards: defaultdict[int, list[float]] = defaultdict(list)
    for each in numbers:
        if each.reward is not None:
            rewards[each.group_index].append(each.reward)
    whole = [values for values in rewards.values() if len(values) == n_samples]
    return len(whole), sum(len(set(values)) == 1 for values in whole)


def _over_time(numbers: Sequence[EndedNumbers]) -> tuple[list[float], list[float]]:
    scored = [(each.finished_at, each.reward) for each in reversed(numbers) if each.reward is not None]
    if not scored:
        return [], []
    parts = np.array_split(np.asarray(scored, dtype=np.float64), min(_N_POINTS, len(scored)))
    return [float(part[-1, 0]) for part in parts], [float(part[:, 1].mean()) for part in parts]


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """The numbers of a batch and its pace: rollouts per second over the last that ended, and seconds left."""

    status: BatchStatus
    per_s: float | None
    left_s: float | None
    age_s: float


class BatchViews:
    """The views; all viewers of a batch share its numbers."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._updates = LiveUpdates(endpoints)
        self._listed: SharedResults[Sequence[BatchSummary]] = SharedResults(1.0)
        self._counted: SharedResults[BatchProgress] = SharedResults(1.0)
        self._parts: SharedResults[tuple[str, bool]] = SharedResults(0.5)
        self._drawn: SharedResults[Figures] = SharedResults(3.0)
        self._pages: SharedResults[str] = SharedResults(_FIGURES_S)

    async def newest(self, request: Request) -> Response:
        """Show the newest batches, or those before one."""
        before = request.query_params.get("before")
        read = partial(self._endpoints.run, self._endpoints.farm.batches, N_BATCHES, before)
        listed = await self._listed.get(before, read)
        return html("batches.html", batches=listed, limit=N_BATCHES, before=before)

    async def batch(self, request: Request) -> Response:
        """Show the numbers of a batch, updated live."""
        progress = await self._progress(request.path_params["id"])
        shared = _shared_filter(request)
        request_of = shown_request(await self._endpoints.run(self._request_of, progress.status.batch_id))
        return html("batch.html", progress=progress, status=progress.status, request_of=request_of, **shared)

    async def live(self, request: Request) -> Response:
        """Stream those numbers whenever they change."""
        batch_id = request.path_params["id"]
        await self._progress(batch_id)

        async def part() -> tuple[str, bool]:
            progress = await self._progress(batch_id)
            return rendered("_progress.html", progress=progress, status=progress.status), progress.status.done

        return self._updates.stream(lambda: self._parts.get(batch_id, part, lambda made: made[1]))

    async def rollouts(self, request: Request) -> Response:
        """Show a page of the rollouts that match the filter in the URL."""
        batch_id = request.path_params["id"]
        after = request.query_params.get("after", "")
        shared = _shared_filter(request)
        wanted = shared["wanted"]
        read = partial(rollout_table.page, batch_id=batch_id, wanted=wanted, after=after, limit=N_ROLLOUTS)
        page = await self._endpoints.run(self._endpoints.farm.store.read, read)
        if not page.rollouts:
            await self._progress(batch_id)
        return html(
            "rollouts.html",
            batch_id=batch_id,
            rollouts=page.rollouts,
            after=page.after,
            **shared,
        )

    async def failures(self, request: Request) -> Response:
        """Show the failures of a batch by kind and first line, and how its policy ended rollouts."""
        return await self._kept_page(request, self._failures)

    async def figures(self, request: Request) -> Response:
        """Show distributions of a batch, and its mean reward over time."""
        return await self._kept_page(request, self._distributions)

    async def selection(self, request: Request) -> Response:
        """Show what trains of a batch, what does not and why, and the cost of both."""
        return await self._kept_page(request, self._selection)

    async def _kept_page(self, request: Request, make: _PageMaker) -> Response:
        """Return a page of a batch and a filter, which is the same for all viewers."""
        batch_id, shared = request.path_params["id"], _shared_filter(request)
        key = (make.__name__, batch_id, *sorted(shared["values"].items()))
        return page(await self._pages.get(key, partial(make, batch_id, shared)))

    async def _failures(self, batch_id: str, shared: dict[str, Any]) -> str:
        progress = await self._progress(batch_id)
        wanted = _unordered(shared["wanted"])
        read = partial(rollout_table.failure_groups, batch_id=batch_id, wanted=wanted)
        groups = await self._endpoints.run(self._endpoints.farm.store.read, read)
        figures = await self._figures(batch_id, wanted)
        return rendered(
            "failures.html", status=progress.status, groups=groups, figures=figures, newest=NEWEST_OF_CHART, **shared
        )

    async def _distributions(self, batch_id: str, shared: dict[str, Any]) -> str:
        wanted = _unordered(shared["wanted"])
        progress = await self._progress(batch_id)
        figures = await self._figures(batch_id, wanted)
        # the numbers below are of the whole batch
        times = (
            await self._endpoints.run(self._endpoints.farm.stage_times, batch_id)
            if progress.status.n_rollouts <= NEWEST_OF_CHART and wanted == EVERY
            else ()
        )
        values: dict[str, Any] = {
            "figures": figures,
            "stage_times": times,
            "newest": NEWEST_OF_CHART,
            "is_whole": wanted == EVERY,
        }
        return rendered("figures.html", status=progress.status, **values, **shared)

    async def _selection(self, batch_id: str, shared: dict[str, Any]) -> str:
        progress = await self._progress(batch_id)
        wanted = _unordered(shared["wanted"])
        selection = await self._endpoints.run(self._select, batch_id, wanted)
        values: dict[str, Any] = {"reasons": REASONS, "newest": rollout_costs.NEWEST, "is_whole": wanted == EVERY}
        return rendered("selection.html", status=progress.status, selection=selection, **values, **shared)

    def _select(self, batch_id: str, wanted: RolloutFilter) -> BatchSelection:
        read = self._endpoints.farm.store.read
        costs = read(partial(rollout_costs.newest_costs, batch_id=batch_id))
        met = partial(rollout_costs.newest_meeting, batch_id=batch_id, wanted=wanted)
        shown = None if wanted == EVERY else read(met)
        return selection(costs, int(self._request_of(batch_id).get("n_samples", 1)), shown)

    async def _figures(self, batch_id: str, wanted: RolloutFilter) -> Figures:
        def read() -> Figures:
            farm = self._endpoints.farm
            request = self._request_of(batch_id)
            numbers = farm.store.read(partial(newest_ended, batch_id=batch_id, wanted=wanted))
            return figures(numbers, int(request.get("n_samples", 1)), farm.newest_version())

        return await self._drawn.get((batch_id, wanted), lambda: self._endpoints.run(read))

    async def _progress(self, batch_id: str) -> BatchProgress:
        make = partial(self._endpoints.run, self._look, batch_id)
        return await self._counted.get(batch_id, make, lambda progress: progress.status.done)

    def _look(self, batch_id: str) -> BatchProgress:
        status = self._endpoints.farm.status(batch_id)
        ends = self._endpoints.farm.store.read(partial(last_ends, batch_id=batch_id))
        now = time.time()
        per_s = None
        if len(ends) > 1 and not status.done:
            per_s = len(ends) / max(now - ends[-1], 0.001)
        left = status.n_rollouts - status.n_finished
        left_s = left / per_s if per_s else None
        age_s = (max(ends, default=now) if status.done else now) - status.created_at
        return BatchProgress(status, per_s, left_s, max(0.0, age_s))

    def _request_of(self, batch_id: str) -> dict[str, Any]:
        return self._endpoints.farm.store.read(partial(batches.request_of, batch_id=batch_id))


def _shared_filter(request: Request) -> dict[str, Any]:
    """Return the filter in a URL, for the templates of all views of a batch. Raises InvalidRequest."""
    values = {name: value for name, value in request.query_params.items() if name != "after"}
    return {"values": values, "wanted": filter_of(values), "states": list(State), "outcomes": list(Outcome)}


def _unordered(wanted: RolloutFilter) -> RolloutFilter:
    """Return a filter without its order, which leaves some rollouts out."""
    return wanted.model_copy(update={"order": EVERY.order, "ascending": EVERY.ascending})


def filter_of(values: Mapping[str, str]) -> RolloutFilter:
    """Return the filter in a query. Empty fields of a form are ignored. Raises InvalidRequest."""
    try:
        return RolloutFilter.model_validate({name: value for name, value in values.items() if value != ""})
    except ValidationError as error:
        raise invalid(error) from None
