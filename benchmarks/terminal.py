"""Cost of rendering a command's output as a terminal does, compared with the raw operation: decoding its bytes.

PYTE_PYTHON names a Python with pyte, which draws the same texts on a `HistoryScreen`; it is not part of the farm.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Callable
from functools import partial

from testkit.report import Report, options
from testkit.scratch_folder import conditions
from workers.tools.terminal.screen import drawn

LINE = "The quick brown fox jumps over the lazy dog, again and again: 123\n"
BAR = "\r{:3d}%|{:60}| {}/16000 [00:01<00:09, 1.5MB/s]"
SIZES = {"10 kB": 10_000, "1 MB": 1_000_000}
_PEER = """
import json, sys, time
import pyte
results = {}
for name, text in json.load(sys.stdin).items():
    screen = pyte.HistoryScreen(200, 50, history=100_000, ratio=0.5)
    stream = pyte.Stream(screen)
    began = time.process_time()
    try:
        stream.feed(text.replace("\\n", "\\r\\n"))
    except (TypeError, UnboundLocalError):
        continue
    results[name] = time.process_time() - began
json.dump(results, sys.stdout)
"""


def _escapes(n: int) -> str:
    draw = random.Random(1)
    parts, size = [], 0
    while size < n:
        parts.append(f"\x1b[{draw.randrange(60)}{draw.choice('ABCDEFGJKPXad@')}x")
        size += len(parts[-1])
    return "".join(parts)[:n]


def _bars(n: int) -> str:
    return "".join(BAR.format(at % 101, "#" * (at % 60), at) for at in range(n // 90))


TEXTS: dict[str, Callable[[int], str]] = {
    "plain": lambda n: LINE * (n // len(LINE)),
    "plain, with one carriage return": lambda n: LINE * (n // len(LINE)) + "1%\r2%\n",
    "a progress bar": _bars,
    "random control sequences": _escapes,
}


def main() -> None:
    arguments = options(__doc__)
    texts = {f"{size} of {kind}": write(n) for kind, write in TEXTS.items() for size, n in SIZES.items()}
    peer: dict[str, float] = {}
    if python := os.environ.get("PYTE_PYTHON"):
        done = subprocess.run(
            [python, "-c", _PEER], input=json.dumps(texts), capture_output=True, text=True, check=True
        )
        peer = json.loads(done.stdout)
    report = Report(f"terminal output, CPU time ({conditions()})")
    n_tries = 3 if arguments.quick else 15
    for name, text in texts.items():
        data = text.encode()
        raw_s = min(_cpu_s(partial(data.decode, "utf-8", "replace")) for _ in range(n_tries))
        times = [_cpu_s(partial(drawn, text)) for _ in range(n_tries)]
        against = {"decode_ms": 1000 * raw_s, **({"pyte_ms": 1000 * peer[name]} if name in peer else {})}
        report.times(name, times, **against)
    report.show(arguments.json)


def _cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    main()
