"""`make train`: a tiny policy learns "follow the files" with a complete farm on this machine.

It clones a policy that is right about once in five times, serves it with a real vLLM on the CPU, starts a farm, and
runs `examples/training/grpo.py`, or TRL (`--trainer trl`), in a separate process. All processes end with this one; the
results stay in the folder of the run. A killed trainer is started again, and resumes from its checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import farm
from examples.training import reward_curve
from examples.training.training_farm import TrainingFarm, cloned_policy, training_farm
from examples.training.turn_text import CONTEXT_TOKENS
from examples.training.vllm_server import vllm_server
from farm.embedded.child_process import ChildProcess
from farm.settings import Settings, settings

TRAINERS = {"plain": "examples.training.grpo", "trl": "examples.training.grpo_trl"}
_STOP_S = 10.0


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        run(options)
    except KeyboardInterrupt:
        print(f"\nstopped; nothing is left running. To go on: make train ARGS='--run {options.run}'")
        sys.exit(130)
    except (farm.FarmError, subprocess.CalledProcessError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="the Python that has torch and vLLM")
    parser.add_argument("--trainer", choices=tuple(TRAINERS), default="plain", help="the loop: the example's, or TRL's")
    parser.add_argument("--trainer-python", type=Path, help="the Python that has TRL (tests/trainers/environment.sh)")
    parser.add_argument("--run", default=time.strftime("%Y%m%d-%H%M%S"), help="name of the run; a known one goes on")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--mode", choices=("sync", "off-policy"), default="sync")
    parser.add_argument("--groups", type=int, default=16, help="problems of a step")
    parser.add_argument("--samples", type=int, default=8, help="rollouts of a problem")
    parser.add_argument("--sandbox", default="namespace", help="the kind of sandbox: auto, singularity or namespace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=0, help="kill -9 the trainer so often, at random moments")
    parser.add_argument("--kill-within-s", type=float, default=60.0, help="each so many seconds after its start")
    options = parser.parse_args()
    if options.trainer == "trl" and (options.trainer_python is None or options.mode != "sync"):
        parser.error("--trainer trl needs --trainer-python, and is synchronous")
    return options


def run(options: argparse.Namespace) -> None:
    folder = settings().home.absolute() / "training" / options.run
    folder.mkdir(parents=True, exist_ok=True)
    policy = cloned_policy(options.python, folder / "policy", "--seed", options.seed)
    print("starting a vLLM on the CPU and a farm", flush=True)
    with (
        vllm_server(options.python, policy, CONTEXT_TOKENS, folder / "vllm.log") as engine_url,
        training_farm(Settings(home=folder / "farm", store_url="", broker_url=""), engine_url) as here,
    ):
        began = time.monotonic()
        train(options, folder, policy, here)
        n_lost = unscored(here)
        print(f"trained in {time.monotonic() - began:.0f} s; {n_lost} rollouts have no score")
        print(f"curve: {folder / 'curve.csv'}, {folder / 'curve.png'}")
        print(f"its rollouts: FARM_HOME={here.home} .venv/bin/farm ls")
    if n_lost:
        sys.exit(1)


def train(options: argparse.Namespace, folder: Path, policy: Path, here: TrainingFarm) -> int:
    """Run the trainer to its end; a killed one is started again. Returns the number of restarts.

    Raises CalledProcessError if it fails.
    """
    python, module = options.trainer_python or options.python, TRAINERS[options.trainer]
    command = [python, "-m", module, folder, "--farm", here.api_url, "--policy", policy]
    for name in ("steps", "mode", "groups", "samples", "sandbox", "seed"):
        command += [f"--{name}", getattr(options, name)]
    words = [str(word) for word in command]
    kills_left, n_killed, moments = options.kills, 0, random.Random(options.seed)
    while True:
        within_s = moments.uniform(0, options.kill_within_s) if kills_left else None
        kills_left -= within_s is not None
        code = ended(ChildProcess(words, env=here.client_variables), within_s)
        if code == 0:
            if options.trainer != "plain":
                # the trainer's Python may lack the package for drawing
                reward_curve.draw(reward_curve.read_table(folder), folder)
            return n_killed
        if code != -signal.SIGKILL:
            raise subprocess.CalledProcessError(code, words)
        n_killed += 1
        print("the trainer was killed; it is started again", flush=True)


def ended(trainer: ChildProcess, within_s: float | None) -> int:
    """Wait for the end of a trainer, or kill it after so many seconds; return its exit code."""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            trainer.process.wait(within_s)
        trainer.send(signal.SIGKILL)
        return trainer.process.wait()
    finally:
        trainer.terminate()
        trainer.end(_STOP_S)


def unscored(here: TrainingFarm) -> int:
    """Return the number of rollouts of all batches that have no score, or have not ended."""
    with farm.connect(here.home) as client:
        return sum(batch.n_rollouts - batch.n_completed for batch in client.batches(1000))


if __name__ == "__main__":
    main()
