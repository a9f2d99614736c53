"""Batches over HTTP: submitted, counted, followed to their ends, acknowledged, cancelled, scored again."""

from __future__ import annotations

from functools import partial

from starlette.routing import Route

from farm.api.desk import Desk, Poll
from farm.api.questions import Acknowledgement, Chosen, Consumer, Ended, Open, Question, Recent


def routes(desk: Desk) -> list[Route]:
    """`/v1/batches`, and the two verbs that take the id of anything."""
    service = desk.service

    def acknowledge(asked: Question) -> int:
        told = asked.told(Acknowledgement)
        return service.acknowledge_up_to(_id(asked), told.cursor, told.consumer)

    def ended(asked: Question) -> Poll:
        wanted = asked.queried(Ended)
        page = partial(service.page, _id(asked), wanted.cursor, wanted.groups, wanted.limit)
        return Poll(_id(asked), page, lambda page: page.settled, wanted.wait_s)

    def is_open(asked: Question) -> Poll:
        has_open = partial(service.has_open, _id(asked))
        return Poll(_id(asked), has_open, lambda is_open: not is_open, asked.queried(Open).wait_s)

    def cancel(asked: Question) -> list[str]:
        told = asked.told(Chosen)
        return service.cancel(told.id, told.rollout_ids)

    def rescore(asked: Question) -> list[str]:
        told = asked.told(Chosen)
        return service.rescore(told.id, told.rollout_ids)

    return [
        desk.post("/v1/batches", lambda asked: {"batch_id": service.submit(asked.body)}),
        desk.get("/v1/batches", lambda asked: service.recent(asked.queried(Recent).limit)),
        desk.get("/v1/batches/{id}", lambda asked: service.status(_id(asked))),
        desk.get("/v1/batches/{id}/rollouts", lambda asked: service.rollouts(_id(asked))),
        desk.poll("/v1/batches/{id}/ended", ended),
        desk.poll("/v1/batches/{id}/open", is_open),
        desk.get(
            "/v1/batches/{id}/acknowledged",
            lambda asked: service.acknowledged(_id(asked), asked.queried(Consumer).consumer),
        ),
        desk.post("/v1/batches/{id}/acknowledged", acknowledge),
        desk.get("/v1/batches/{id}/conservation", lambda asked: service.conservation(_id(asked))),
        desk.get("/v1/batches/{id}/violations", lambda asked: service.violations(_id(asked))),
        desk.post("/v1/cancel", cancel),
        desk.post("/v1/rescore", rescore),
    ]


def _id(asked: Question) -> str:
    return asked.path["id"]
