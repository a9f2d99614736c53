"""The difference that a policy made to a marked tree, as a submission; one that cannot be taken is rejected."""

from __future__ import annotations

from farm.errors import SandboxError
from workers.evaluators.node_conditions import observed
from workers.evaluators.patches import GIT_ENV, REJECTED, patch_files, said, script
from workers.evaluators.process_end import EndCause, ProcessEnd, doing
from workers.plugins.interfaces import Sandbox, Submission

GIT_S = 45.0
"""Seconds for git; less than a stage's limit for collecting, so that it is reached first."""
MAX_PATCH_BYTES = 1_000_000


async def difference(sandbox: Sandbox, tree: str, answer: str | None, git_s: float = GIT_S) -> Submission:
    """Return the difference to the marked tree, at most 1 MB, or a rejection if the policy broke its repository.

    Errors in the tree that the policy left are its own, and rejected. Raises SandboxError if the node was late or short
    of a resource, and TimeoutError if it takes so long that a fresh sandbox must decide the cause.
    """
    env = {**GIT_ENV, "MAX_BYTES": str(MAX_PATCH_BYTES + 1)}
    async with observed() as conditions:
        result = await sandbox.exec(["bash", "-c", script("collect_difference")], timeout_s=git_s, env=env, cwd=tree)
    if result.code != 0:
        whose, reason = doing(ProcessEnd.of(result, git_s, conditions))
        if whose is EndCause.FARM or conditions.shortage:
            raise SandboxError(f"sandbox {sandbox.sandbox_id}: its difference cannot be taken: {reason}")
        if whose is EndCause.UNKNOWN and result.timed_out:
            raise TimeoutError(f"its difference was not taken within {git_s:g} s: {said(result)}")
        return _rejected(answer, f"the tree's repository is broken, so there is no difference: {said(result)}")
    if len(result.stdout) > MAX_PATCH_BYTES:
        return _rejected(answer, f"the patch is too large; at most {MAX_PATCH_BYTES} bytes are scored")
    return Submission(answer=answer, files=patch_files(result.stdout))


def _rejected(answer: str | None, reason: str) -> Submission:
    return Submission(answer=answer, files={REJECTED: reason})
