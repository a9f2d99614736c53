"""Creates images and all other parts of sandboxes before they are requested, several at a time.

Each helper process handles one job after the other. Only a process can be interrupted so that it removes its unfinished
work: after Ctrl-C nothing is left half done.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from farm.errors import FarmError, ImageError
from farm.records.request import SandboxSpec
from farm.settings import settings
from workers.config import SandboxConfig

_END_S = 30.0


@dataclass(frozen=True, slots=True)
class PrefetchJob:
    """One job: all parts of a spec, or with `by_name` only its image, which is then locked again."""

    label: str
    spec: SandboxSpec
    by_name: bool = False


@dataclass(frozen=True, slots=True)
class PrefetchResult:
    """The result of a job: `error` is empty if the image exists now; `lines` are the last of the builder's output.

    `notes` name the ignored instructions of its Dockerfile.
    """

    job: PrefetchJob
    seconds: float
    error: str = ""
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def prefetch_all(
    jobs: Sequence[PrefetchJob], n_processes: int, tell: Callable[[PrefetchResult], None]
) -> list[PrefetchResult]:
    """Do all jobs; `tell` is called for each as it is done. If interrupted, unfinished work is removed."""
    waiting: queue.SimpleQueue[PrefetchJob] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    done: queue.SimpleQueue[PrefetchResult] = queue.SimpleQueue()
    helpers = [_Helper(waiting, done) for _ in range(min(n_processes, len(jobs)))]
    results = []
    try:
        for _ in jobs:
            results.append(done.get())
            tell(results[-1])
    finally:
        for helper in helpers:
            helper.interrupt()
        for helper in helpers:
            helper.join()
    return results


class _Helper:
    """A thread that passes one job after the other to a process, and starts another process if that breaks."""

    def __init__(self, waiting: queue.SimpleQueue[PrefetchJob], done: queue.SimpleQueue[PrefetchResult]) -> None:
        self._waiting, self._done = waiting, done
        self._stopped = threading.Event()
        self._process = _start()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._stopped.is_set():
            try:
                job = self._waiting.get_nowait()
            except queue.Empty:
                break
            if self._process.poll() is not None:
                self._close()
                self._process = _start()
            self._done.put(self._do(job))

    def _do(self, job: PrefetchJob) -> PrefetchResult:
        started = time.monotonic()
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(json.dumps([job.spec.model_dump(mode="json"), job.by_name]) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
        except (OSError, ValueError):
            code = self._process.wait()
            return PrefetchResult(job, time.monotonic() - started, f"the process that made it ended with code {code}")
        seconds = time.monotonic() - started
        return PrefetchResult(job, seconds, answer["error"], tuple(answer["lines"]), tuple(answer["notes"]))

    def interrupt(self) -> None:
        """Make it drop its current job and take no more."""
        self._stopped.set()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def join(self) -> None:
        """Wait until it has cleaned up and ended."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._thread.join()
        self._close()

    def _close(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                # output that was not read any more cannot be flushed either
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _start() -> subprocess.Popen[str]:
    """Start a helper process. It cleans up after a signal from its parent, or from the kernel if that has ended."""
    return subprocess.Popen(
        ["setpriv", "--pdeathsig", "INT", "--", sys.executable, "-m", "workers.node.image_prefetch"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | settings().chosen_variables,
        start_new_session=True,
    )


def _make(spec: SandboxSpec, by_name: bool) -> Sequence[str]:
    # imported here, because the process that only waits for this one does not need it
    from workers.sandboxes.images.image import image
    from workers.sandboxes.launch_plan import prepare, start_build

    config = SandboxConfig.of(settings())
    start = partial(start_build, config)
    made = image(
        config, spec.image, spec.image_values, fallback=spec.fallback_image, retry=True, relock=by_name, start=start
    )
    if not by_name:
        prepare(config, spec)
    return made.config.notes


def _answer(line: str) -> dict[str, Any]:
    fields, by_name = json.loads(line)
    try:
        notes = _make(SandboxSpec.model_validate(fields), by_name)
    except ImageError as error:
        return {"error": error.message, "lines": error.lines, "notes": ()}
    except FarmError as error:
        return {"error": str(error), "lines": [], "notes": ()}
    return {"error": "", "lines": [], "notes": notes}


def _interrupted(number: int, frame: FrameType | None) -> None:
    # only once: a second signal must not disturb the clean-up
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    """Run as a helper process: a job per line of standard input, an answer per line of standard output."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)
    # prints must not mix with the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        for line in sys.stdin:
            answers.write(json.dumps(_answer(line)) + "\n")
            answers.flush()
    except KeyboardInterrupt:
        os._exit(130)


if __name__ == "__main__":
    main()
