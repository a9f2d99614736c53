"""Annotations of rollouts, written back by trainers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from farm.records.scoring.annotation import Annotation, NewAnnotation


class AnnotationLog(ABC):
    """Values about rollouts, each written once. Raises like the verbs of `Farm`."""

    @abstractmethod
    def write(self, producer: str, step: int, annotations: Sequence[NewAnnotation | Mapping[str, Any]]) -> int:
        """Write a producer's annotations for a step, all or none; return how many were new. See `Farm.annotate`."""

    @abstractmethod
    def of(self, rollout_id: str) -> Sequence[Annotation]:
        """Return the annotations of a rollout as they were written. Raises NotFound."""
