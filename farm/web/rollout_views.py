"""Views of one rollout: its transcript, terminal, tokens and timeline; and of the samples of one instance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from sqlalchemy import Connection, select
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from farm.api.endpoints import Endpoints
from farm.errors import NotFound
from farm.ids import RolloutRef
from farm.observing.timeline import spans
from farm.records.rollout import Rollout
from farm.records.trajectory import ModelCall, Segment
from farm.store import batches, trajectories
from farm.store.rollouts import rollouts
from farm.web.rendering import HEADERS, ROOT, html
from farm.web.siblings import siblings
from farm.web.terminal_replay import terminal_steps
from farm.web.token_view import MOST, TokenRow, token_row
from farm.web.transcript import conversation

MOST_SIBLINGS = 16
"""The maximum number of samples of a group that are shown side by side."""


class RolloutViews:
    """The views."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    async def transcript(self, request: Request) -> Response:
        """Show the conversation, turn by turn, with scores and artefacts."""
        rollout_id = request.path_params["id"]
        rollout = await self._rollout(rollout_id)
        farm = self._endpoints.farm
        calls, timings, rewards, artefacts = await asyncio.gather(
            self._endpoints.run(farm.calls, rollout_id),
            self._endpoints.run(farm.timings, rollout_id),
            self._endpoints.run(farm.rewards, rollout_id),
            self._endpoints.run(farm.artefacts, rollout_id),
        )
        return html(
            "transcript.html",
            rollout=rollout,
            messages=conversation(calls),
            timings=timings,
            rewards=rewards,
            artefacts=artefacts,
        )

    async def tokens(self, request: Request) -> Response:
        """Show the training rows, token by token."""
        rollout_id = request.path_params["id"]
        rollout = await self._rollout(rollout_id)
        rows, figures = await asyncio.gather(
            self._endpoints.run(self._segments, rollout),
            self._endpoints.run(self._endpoints.farm.annotations.of, rollout_id),
        )
        by = request.query_params.get("by", "")
        chosen = figures[int(by)] if by.isdecimal() and int(by) < len(figures) else None

        def made() -> list[TokenRow]:
            shown = [chosen.tokens if chosen is not None and chosen.row == at else None for at in range(len(rows))]
            return [token_row(at, row, each) for at, (row, each) in enumerate(zip(rows, shown, strict=True))]

        shown_rows = await self._endpoints.run(made)
        return html("tokens.html", rollout=rollout, rows=shown_rows, most=MOST, figures=figures, chosen=chosen)

    async def terminal(self, request: Request) -> Response:
        """Show the commands of the rollout and their outputs, as a terminal session for replay."""
        rollout_id = request.path_params["id"]
        rollout = await self._rollout(rollout_id)
        steps = terminal_steps(await self._endpoints.run(self._endpoints.farm.calls, rollout_id))
        return html("terminal.html", rollout=rollout, steps=steps)

    async def timeline(self, request: Request) -> Response:
        """Show stages, model calls and the tools between them on a timeline."""
        rollout_id = request.path_params["id"]
        rollout = await self._rollout(rollout_id)
        farm = self._endpoints.farm
        calls, timings = await asyncio.gather(
            self._endpoints.run(farm.calls, rollout_id), self._endpoints.run(farm.timings, rollout_id)
        )
        drawn = spans(rollout, timings, calls, time.time())
        end_s = max((span.end_s for span in drawn), default=0.0)
        lanes = list(dict.fromkeys(span.lane for span in drawn))
        return html("timeline.html", rollout=rollout, spans=drawn, lanes=lanes, end_s=end_s or 1.0)

    async def group(self, request: Request) -> Response:
        """Show the samples of one instance side by side."""
        place = RolloutRef.of(request.path_params["id"])
        if place.kind != "group":
            raise NotFound(f"there is no group {place}: its id is BATCH.GROUP")
        members, calls, rows = await self._endpoints.run(self._members, place)
        made = siblings(members, calls, rows)
        return html("group.html", group_id=str(place), batch_id=place.batch_id, siblings=made, most=MOST_SIBLINGS)

    async def find(self, request: Request) -> Response:
        """Redirect to the batch, group or rollout of an id."""
        place = RolloutRef.of(request.query_params.get("id", "").strip())
        folder = {"batch": "batches", "group": "groups", "rollout": "rollouts"}[place.kind]
        return RedirectResponse(f"{ROOT}/{folder}/{place}", 303, HEADERS)

    async def _rollout(self, rollout_id: str) -> Rollout:
        return await self._endpoints.run(self._endpoints.farm.rollout, rollout_id)

    def _segments(self, rollout: Rollout) -> Sequence[Segment]:
        farm = self._endpoints.farm
        ids = [rollout.rollout_id]
        rows = farm.store.read(lambda connection: trajectories.segments_of(connection, rollout.batch_id, ids))
        return rows.get(rollout.rollout_id, ())

    def _members(self, place: RolloutRef) -> tuple[list[Rollout], list[Sequence[ModelCall]], list[Sequence[Segment]]]:
        store = self._endpoints.farm.store
        members = store.read(lambda connection: _of_group(connection, place))
        if not members:
            raise NotFound(f"there is no group {place}")
        ids = [each.rollout_id for each in members]
        calls: list[Sequence[ModelCall]] = [self._endpoints.farm.calls(id) for id in ids]
        rows = store.read(lambda connection: trajectories.segments_of(connection, place.batch_id, ids))
        return members, calls, [rows.get(id, ()) for id in ids]


def _of_group(connection: Connection, place: RolloutRef) -> list[Rollout]:
    chosen = (
        select(rollouts)
        .where(rollouts.c.batch_id == place.batch_id, rollouts.c.group_index == place.group_index)
        .order_by(rollouts.c.sample_index)
        .limit(MOST_SIBLINGS)
    )
    return batches.rollouts_by(connection, chosen)
