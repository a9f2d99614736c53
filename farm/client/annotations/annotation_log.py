"""The figures that trainers write back about rollouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from farm.records.scoring.annotation import Annotation, NewAnnotation


class AnnotationLog(ABC):
    """Figures about rollouts, each written once. Raises as the verbs of `Farm` do."""

    @abstractmethod
    def write(self, producer: str, step: int, annotations: Sequence[NewAnnotation | Mapping[str, Any]]) -> int:
        """Write figures of a producer's step, all or none; return how many were not there. See `Farm.annotate`."""

    @abstractmethod
    def of(self, rollout_id: str) -> Sequence[Annotation]:
        """Return the figures about a rollout, as they were written. Raises NotFound."""
