"""The swebench library, a pinned, unmodified copy for this node: its log parsers and its rule of resolution.

Its sources are fetched from the package index by digest, once, into the farm's cache. It runs in a separate process
with its own limits for each log, as a log is the policy's output.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from farm.errors import EvaluatorError, SandboxError
from farm.records.request import Archive
from workers.config import SandboxConfig
from workers.evaluators.issues.issue import Issue
from workers.sandboxes.images.archives import layer

SWEBENCH = Archive(
    name="swebench",
    version="5.0.2",
    sha256="faae7b1307b8188e842e78ef5826cf0d64fa78486adc41e3414f9533b9e0d7eb",
    path="/swebench",
)
"""MIT licence; github.com/SWE-bench/SWE-bench."""
UNIDIFF = Archive(
    name="unidiff",
    version="0.7.5",
    sha256="2e5f0162052248946b9f0970a40e9e124236bf86c82b70821143a6fc1dea2574",
    path="/unidiff",
)
"""MIT licence; the library's dependencies outside the standard library."""
_CPU_S = 60
_WALL_S = 300.0


@dataclass(frozen=True, slots=True)
class GradedLog:
    """The library's verdict on a log.

    `complete` is False for a log without readable results; `infra_failure` then names a visible fault of the
    environment, if any. `statuses` are those of all tests, by the parser's names; `unmended` and `broken` are the
    required tests that did not pass, `contradicted` those that passed by one line and failed by another. `refused` says
    why the library could not read the log.
    """

    resolved: bool
    complete: bool
    infra_failure: str
    statuses: Mapping[str, str]
    still_failing: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    contradicted: tuple[str, ...] = ()
    refused: str = ""


async def grade(config: SandboxConfig, issue: Issue, log: str) -> GradedLog:
    """Grade a log. Raises EvaluatorError, not retryable if the library lacks the row's parser."""
    folders = await library_folders(config)
    wanted = ("instance_id", "repo", "version", "log_parser", "eval_type", "fail_to_pass", "pass_to_pass")
    fields = asdict(issue)
    job = {"folders": folders, "issue": {name: fields[name] for name in wanted}, "log": log, "cpu_s": _CPU_S}
    code, reply, words = await _run(job)
    if code in (-signal.SIGXCPU, -signal.SIGKILL) and not reply:
        return GradedLog(False, False, "", {}, refused=f"the log cannot be read within {_CPU_S} s of computing")
    try:
        answer: dict[str, Any] = json.loads(reply)
    except ValueError:
        raise EvaluatorError(f"{issue.instance_id}: the swebench library failed on the log: {words}") from None
    if "unknown_parser" in answer:
        error = EvaluatorError(
            f"{issue.instance_id}: swebench {SWEBENCH.version} has no parser {answer['unknown_parser']!r}: give the "
            "row a `log_parser` that it has"
        )
        error.retryable = False
        raise error
    report = answer["report"]
    tests = report.get("tests_status", {})
    return GradedLog(
        resolved=report["resolved"],
        complete=answer["complete"],
        infra_failure=report.get("infra_failure_reason", "") if report["infra_failure"] else "",
        statuses=answer["statuses"],
        still_failing=tuple(tests.get("FAIL_TO_PASS", {}).get("failure", ())),
        broken=tuple(tests.get("PASS_TO_PASS", {}).get("failure", ())),
        contradicted=tuple(answer["contradicted"]),
    )


async def library_folders(config: SandboxConfig) -> list[str]:
    """Return the folders from which its modules are imported, fetched if necessary. Raises EvaluatorError."""
    try:
        layers = [await asyncio.to_thread(layer, config, archive) for archive in (SWEBENCH, UNIDIFF)]
    except SandboxError as error:
        raise EvaluatorError(
            f"SWE-bench rows need the swebench library, which this node does not have: {error}; let it reach "
            "the package index once, or copy the folder cache/archives of FARM_HOME from a node that has it"
        ) from error
    paths = zip(layers, (SWEBENCH, UNIDIFF), strict=True)
    return [str(folder / archive.path.strip("/")) for folder, archive in paths]


async def _run(job: Mapping[str, Any]) -> tuple[int, bytes, str]:
    source = files("workers.evaluators.issues").joinpath("library_program.py").read_text()
    process = await asyncio.create_subprocess_exec(
        *("setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-I", "-S", "-c", source),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        cwd="/",
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_WALL_S):
            out, err = await process.communicate(json.dumps(job).encode())
    except TimeoutError:
        raise EvaluatorError(f"the swebench library did not answer within {_WALL_S:.0f} s") from None
    finally:
        with suppress(ProcessLookupError):
            if process.returncode is None:
                process.kill()
    return process.returncode or 0, out, err.decode("utf-8", "replace").strip()[-500:]
