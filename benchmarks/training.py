"""Cost of the farm where it is relatively largest: short episodes of a tiny policy, by a real vLLM on the same CPUs.

Three ways to run the same episodes (the same problems, seeds and engine) take turns in one run: the farm; a plain loop
on the engine's API, with a dictionary in place of the sandbox; and that loop with the same sandboxes, started directly.
Before each, the engine's prefix cache is emptied. CPU time is that of all processes, by part.

Needs the environment of `make train`: `python -m benchmarks.training --python .farm/vllm/.venv/bin/python`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

import farm
from benchmarks.cpu_parts import CpuParts, cpu_parts, put_farm
from benchmarks.plain_episodes import MAX_TOKENS, MAX_TURNS, PlainEpisode, PlainLoop
from examples.training.file_chains import DATA_SOURCE, FileChain, file_chains
from examples.training.training_farm import cloned_policy, training_farm
from examples.training.turn_text import CONTEXT_TOKENS
from examples.training.vllm_server import vllm_server
from farm.settings import Settings, settings
from testkit.processes import tree
from testkit.report import Report
from testkit.scratch_folder import conditions, scratch
from workers.plugins import registry
from workers.sandboxes.provider import NodeSandboxProvider

SEED = 1
FARM, PLAIN, BY_HAND = "farm", "plain", "sandboxes by hand"
AT_MOST = {PLAIN: 1.3, BY_HAND: 1.1}
_END_S = 600.0


@dataclass(slots=True)
class Rounds:
    """Measurements of each way: seconds, CPU seconds by part, and episodes, round by round."""

    times_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu_s: dict[str, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    episodes: dict[str, list[list[PlainEpisode]]] = field(default_factory=lambda: defaultdict(list))

    def ratio(self, way: str) -> float:
        """Return the median over all rounds of the farm's time divided by that of another way."""
        return statistics.median(a / b for a, b in zip(self.times_s[FARM], self.times_s[way], strict=True))

    def cpu_ms(self, way: str, part: str, n: int) -> float:
        """Return the median of a part's CPU time per episode."""
        return statistics.median(used.get(part, 0.0) for used in self.cpu_s[way]) / n * 1000

    def same(self, way: str) -> float:
        """Return the share of episodes with the same reward, turns and tokens as in the farm."""
        pairs = [
            (ours, theirs)
            for one, other in zip(self.episodes[FARM], self.episodes[way], strict=True)
            for ours, theirs in zip(one, other, strict=True)
        ]
        return sum(ours == theirs for ours, theirs in pairs) / len(pairs)


def main() -> None:
    options = _options()
    home = settings().home.absolute()
    policy = cloned_policy(options.python, home / "training" / "benchmark-policy")
    report = Report(f"the farm and plain loops ({conditions()})")
    with (
        scratch() as place,
        tempfile.TemporaryDirectory(prefix="farm-benchmark-") as folder,
        ExitStack() as stack,
    ):
        parts = stack.enter_context(cpu_parts())
        engine_url = stack.enter_context(vllm_server(options.python, policy, CONTEXT_TOKENS, Path(folder) / "vllm.log"))
        if parts is not None:
            parts.put("engine", tree(os.getpid())[1:])
        own = Settings(home=Path(folder) / "home", scratch=place, store_url="", broker_url="")
        here = stack.enter_context(training_farm(own, engine_url))
        client = stack.enter_context(farm.connect(here.home))
        tokenizer = Tokenizer.from_file(str(policy / "tokenizer.json"))
        provider = registry.sandbox(options.sandbox)
        assert isinstance(provider, NodeSandboxProvider)
        plain, by_hand = PlainLoop(engine_url, tokenizer), PlainLoop(engine_url, tokenizer, provider)
        ways = {
            FARM: lambda chains: farm_episodes(client, chains, options),
            PLAIN: lambda chains: asyncio.run(plain.run_episodes(chains, options.samples, SEED)),
            BY_HAND: lambda chains: asyncio.run(by_hand.run_episodes(chains, options.samples, SEED)),
        }
        rounds = measured(ways, engine_url, parts, options)
    tell(report, rounds, options)
    report.show(options.json)


def measured(
    ways: dict[str, Callable[[Sequence[FileChain]], list[PlainEpisode]]],
    engine_url: str,
    parts: CpuParts | None,
    options: argparse.Namespace,
) -> Rounds:
    """Run all rounds; the ways take turns, and each is equally often the first. The first round is a warm-up."""
    rounds, names = Rounds(), list(ways)
    for number in range(options.rounds + 1):
        chains = file_chains(SEED, number, options.groups)
        for name in [*names[number % 3 :], *names[: number % 3]]:
            _post(f"{engine_url}/reset_prefix_cache")
            before = parts.used_s() if parts is not None else {}
            began = time.perf_counter()
            episodes = ways[name](chains)
            elapsed_s = time.perf_counter() - began
            if number:
                after = parts.used_s() if parts is not None else {}
                rounds.times_s[name].append(elapsed_s)
                rounds.cpu_s[name].append({part: used - before.get(part, 0.0) for part, used in after.items()})
                rounds.episodes[name].append(episodes)
        if not number and parts is not None:
            # only after everything that the first user starts is running
            put_farm(parts, os.getpid())
            forkers = [pid for pid in tree(os.getpid())[1:] if _is_own_fork_server(pid)]
            parts.put("sandboxes", forkers)
            parts.put("client", [os.getpid()])
    return rounds


def _is_own_fork_server(pid: int) -> bool:
    """Return whether a process is the fork server of this process's sandboxes, or was forked by it."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(stat[1]) == os.getpid() and b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()


def farm_episodes(client: farm.Farm, chains: Sequence[FileChain], options: argparse.Namespace) -> list[PlainEpisode]:
    """Run the episodes with the farm."""
    request = farm.BatchRequest(
        instances=tuple(farm.Instance(data_source=DATA_SOURCE, fields=chain.fields) for chain in chains),
        n_samples=options.samples,
        sampling=farm.SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, seed=SEED),
        limits=farm.Limits(max_turns=MAX_TURNS),
        sandbox=options.sandbox,
    )
    rollouts = client.collect(client.submit(request), timeout_s=_END_S)
    broken = [rollout for rollout in rollouts if rollout.reward is None]
    if broken:
        raise RuntimeError(f"{len(broken)} rollouts broke; the first: {broken[0].failure}")
    return [PlainEpisode(rollout.reward or 0.0, rollout.n_turns, rollout.n_response_tokens) for rollout in rollouts]


def tell(report: Report, rounds: Rounds, options: argparse.Namespace) -> None:
    n = options.groups * options.samples
    for way in (FARM, PLAIN, BY_HAND):
        report.times(f"{way}, an episode", [seconds / n for seconds in rounds.times_s[way]])
    for way, most in AT_MOST.items():
        report.add(f"farm to {way}", rounds.ratio(way), "", at_most=most, same_episodes=rounds.same(way))
    names = {part for way in rounds.cpu_s.values() for used in way for part in used}
    for way in rounds.cpu_s:
        rounds.cpu_s[way] = [used | {"all": sum(used.values())} for used in rounds.cpu_s[way]]
    for part in [*sorted(names), *(["all"] if names else [])]:
        others = {way.replace(" ", "_"): rounds.cpu_ms(way, part, n) for way in (PLAIN, BY_HAND)}
        report.add(f"CPU an episode: {part}", rounds.cpu_ms(FARM, part, n), "ms", **others)


def _post(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60):
        pass


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="the Python that has torch and vLLM")
    parser.add_argument("--sandbox", default="namespace", choices=("namespace", "singularity"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--groups", type=int, default=16, help="problems of a round")
    parser.add_argument("--samples", type=int, default=8, help="episodes of a problem")
    parser.add_argument("--quick", action="store_const", dest="rounds", const=3, help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
