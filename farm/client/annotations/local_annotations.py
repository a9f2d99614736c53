"""Annotations of rollouts, on a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy.exc import IntegrityError

from farm.callers import current_caller
from farm.client.annotations.annotation_log import AnnotationLog
from farm.client.request_checks import checked
from farm.ids import RolloutRef
from farm.records.scoring.annotation import Annotation, NewAnnotation, NewAnnotations
from farm.store import batches
from farm.store.blobs import stored_annotations
from farm.store.database import Store


class LocalAnnotations(AnnotationLog):
    """The verbs on a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, producer: str, step: int, annotations: Sequence[NewAnnotation | Mapping[str, Any]]) -> int:
        new = checked(NewAnnotations, {"producer": producer, "step": step, "annotations": list(annotations)})
        write = partial(stored_annotations.write, new=new, caller=current_caller())
        try:
            return self._store.write(write)
        except IntegrityError:  # another process wrote some at the same moment; now they can be compared
            return self._store.write(write)

    def of(self, rollout_id: str) -> Sequence[Annotation]:
        RolloutRef.of(rollout_id)
        self._store.read(lambda connection: batches.rollout(connection, rollout_id))
        return self._store.read(lambda connection: stored_annotations.listing(connection, [rollout_id]))
