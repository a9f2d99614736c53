"""The adapter of verifiers, with the taskset of `verifiers_sums` sent along."""

from __future__ import annotations

from workers.environments.adapters.verifiers import Verifiers


class VerifiersSums(Verifiers):
    """Its tasks are `verifiers_sums:Sums`."""

    modules = ("verifiers_sums", "workers.environments.adapters.verifiers")
