"""`make demo`: a complete farm on this machine runs real problems and shows the results.

The policy is the server at FARM_POLICY_URL (any OpenAI-compatible server), if set. Else it is the scripted engine, a
test double with a seeded mix of reference solutions, wrong solutions and tool use. Nothing else is a double.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

import farm
from examples import problems, scripts
from farm.cli import display
from farm.embedded.child_process import ChildProcess
from farm.embedded.embedded_farm import Embedded
from farm.home import KEY_FILE
from farm.settings import default_home, settings

console = Console()
FAMILIES = ("gcd", "simple_equations", "base_conversion")
_START_S = 30.0
_TICK_S = 0.5


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        run(options)
    except KeyboardInterrupt:
        console.print("\nstopped; nothing is left running")
        sys.exit(130)
    except farm.FarmError as error:
        console.print(f"[red]{type(error).__name__}[/red]: {error}")
        sys.exit(1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--samples", type=int, default=4, help="rollouts of each problem")
    parser.add_argument("--math", type=int, default=2, help="problems of each of the three math families")
    parser.add_argument("--code", type=int, default=6, help="HumanEval problems")
    parser.add_argument("--swe", type=int, default=2, help="SWE instances")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-flower", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep the farm and its page up until Ctrl-C")
    return parser.parse_args()


def run(options: argparse.Namespace) -> None:
    instances = [
        *problems.math_problems(FAMILIES, options.math, options.seed),
        *problems.humaneval_problems(options.code),
        *problems.swe_problems(options.swe),
    ]
    with (
        policy(instances, options.seed) as (url, note),
        Embedded(settings(), flower=not options.no_flower, api=True, env={"FARM_POLICY_URL": url}) as here,
        farm.connect(here.home) as client,
    ):
        page = f"{here.api_url}/web/"
        console.print(f"policy {url} ({note})\nstore  {here.store_url}", soft_wrap=True)
        console.print(f"page   {page} (the key is in {here.home / KEY_FILE})", soft_wrap=True)
        console.print(f"flower {here.flower_url or '-'}", soft_wrap=True)
        started = time.monotonic()
        batch_id = client.submit(
            farm.BatchRequest(
                instances=tuple(instances),
                n_samples=options.samples,
                sampling=farm.SamplingParams(seed=options.seed),
                metadata={"from": "make demo"},
            )
        )
        status = display.watch(client, batch_id, console, check=here.check)
        rollouts = client.rollouts(batch_id)
        console.print(display.group_table(rollouts))
        for line in display.failures(rollouts)[:5]:
            console.print(line, style="red", markup=False)
        show_one(client, rollouts)
        console.print(
            f"{status.n_completed} of {status.n_rollouts} rollouts scored in {time.monotonic() - started:.1f} s, "
            f"mean reward {status.mean_reward or 0:.3f}, {status.n_failed} failed"
        )
        there = "" if here.home == default_home() else f"FARM_HOME={here.home} "
        if options.keep:
            console.print(f"the page shows it: {page}batches/{batch_id}; Ctrl-C ends the farm", soft_wrap=True)
            while True:
                here.check()
                time.sleep(_TICK_S)
        console.print(f"the farm ends now; its rollouts stay in {here.home}", soft_wrap=True, highlight=False)
        console.print(f"look again: {there}.venv/bin/farm watch {batch_id}", soft_wrap=True, highlight=False)
        console.print(f"a farm that stays: {there}.venv/bin/farm up", soft_wrap=True, highlight=False)
        console.print('its page, with this batch: make demo ARGS="--keep"', soft_wrap=True, highlight=False)
        if status.n_completed != status.n_rollouts:
            sys.exit(1)


def show_one(client: farm.Farm, rollouts: list[farm.Rollout]) -> None:
    """Print the full transcript of the scored rollout with the most turns."""
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    if scored:
        chosen = max(scored, key=lambda rollout: (rollout.n_turns, rollout.reward or 0.0))
        key = chosen.rollout_id
        console.print(display.transcript(chosen, client.calls(key), client.timings(key), client.rewards(key)))


@contextmanager
def policy(instances: list[farm.Instance], seed: int) -> Iterator[tuple[str, str]]:
    """Yield (URL, description) of the policy's server; a server that was started here is ended."""
    result = settings().policy_url
    if result:
        yield result, "from FARM_POLICY_URL"
        return
    folder = settings().home.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    script = scripts.write_script(scripts.example_script(instances, seed), folder / "script.jsonl")
    log = folder / "logs" / "policy.log"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "workers.testing.engine", "--book", str(script), "--seed", str(seed)]
    command += ["--model-text", str(folder / "scripted-model")]
    child = ChildProcess(command, log=log, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    try:
        yield f"{_printed_url(child, log)}/v1", "the scripted engine, a test double: it follows a script"
    finally:
        child.terminate()
        child.end(5.0)


def _printed_url(child: ChildProcess, log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and child.running:
        for line in log.read_text().splitlines():
            if line.startswith("http://"):
                return line.strip().removesuffix("/v1")
        time.sleep(0.05)
    raise farm.ServiceError(f"the scripted engine did not start: {log.read_text()[-500:]}")


if __name__ == "__main__":
    main()
