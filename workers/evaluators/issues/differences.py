"""The policy's diff of a marked tree, as a submission; rejected if it cannot be computed."""

from __future__ import annotations

from farm.errors import SandboxError
from workers.evaluators.node_conditions import observed
from workers.evaluators.patches import GIT_ENV, REJECTED, output_end, patch_files, script
from workers.evaluators.process_end import EndCause, ProcessEnd, doing
from workers.plugins.interfaces import Sandbox, Submission

GIT_S = 45.0
"""Seconds for git; below the stage's limit for collecting, so that it is reached first."""
MAX_PATCH_BYTES = 1_000_000


async def difference(sandbox: Sandbox, tree: str, answer: str | None, git_s: float = GIT_S) -> Submission:
    """Return the diff against the marked tree, at most 1 MB, or a rejection if the policy broke its repository.

    Errors caused by the policy's tree are rejections. Raises SandboxError if the node was late or short of a resource,
    and TimeoutError if it takes so long that a fresh sandbox must decide the cause.
    """
    env = {**GIT_ENV, "MAX_BYTES": str(MAX_PATCH_BYTES + 1)}
    async with observed() as conditions:
        result = await sandbox.exec(["bash", "-c", script("collect_difference")], timeout_s=git_s, env=env, cwd=tree)
    if result.code != 0:
        whose, reason = doing(ProcessEnd.of(result, git_s, conditions))
        if whose is EndCause.FARM or conditions.shortage:
            raise SandboxError(f"sandbox {sandbox.sandbox_id}: its diff cannot be computed: {reason}")
        if whose is EndCause.UNKNOWN and result.timed_out:
            raise TimeoutError(f"its diff was not computed within {git_s:g} s: {output_end(result)}")
        return _rejected(answer, f"the tree's repository is broken, so there is no diff: {output_end(result)}")
    if len(result.stdout) > MAX_PATCH_BYTES:
        return _rejected(answer, f"the patch is too large; at most {MAX_PATCH_BYTES} bytes are scored")
    return Submission(answer=answer, files=patch_files(result.stdout))


def _rejected(answer: str | None, reason: str) -> Submission:
    return Submission(answer=answer, files={REJECTED: reason})
