"""The verifiers adapter, sent together with the taskset of `verifiers_sums`."""

from __future__ import annotations

from workers.environments.adapters.verifiers import Verifiers


class VerifiersSums(Verifiers):
    """Uses the taskset `verifiers_sums:Sums`."""

    modules = ("verifiers_sums", "workers.environments.adapters.verifiers")
