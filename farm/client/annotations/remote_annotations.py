"""Annotations of rollouts, through the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farm.client.annotations.annotation_log import AnnotationLog
from farm.client.http_connection import ApiConnection
from farm.client.request_checks import checked
from farm.ids import RolloutRef
from farm.records.scoring.annotation import Annotation, NewAnnotation, NewAnnotations


class RemoteAnnotations(AnnotationLog):
    """The verbs over HTTP."""

    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    def write(self, producer: str, step: int, annotations: Sequence[NewAnnotation | Mapping[str, Any]]) -> int:
        new = checked(NewAnnotations, {"producer": producer, "step": step, "annotations": list(annotations)})
        return self._api.post(int, "/v1/annotations", new.model_dump(mode="json", exclude_none=True))

    def of(self, rollout_id: str) -> Sequence[Annotation]:
        return self._api.get(list[Annotation], f"/v1/rollouts/{RolloutRef.of(rollout_id)}/annotations")
