"""`python -m workers.testing.engine` serves a scripted engine, and prints its URL (without `/v1`) once it listens."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from workers.testing.engine import MODEL, ScriptedEngine
from workers.testing.engine.scheduler import CACHE_TOKENS, UNLIMITED
from workers.testing.scripted_model import Script
from workers.testing.serving import serve

_OF_ENGINE = (
    *("model", "seed", "latency_s", "prefill_per_s", "tokens_per_s", "max_running", "max_queued"),
    *("context_tokens", "cache_tokens", "weight_version", "mean_tokens"),
)
"""The options that are arguments of the engine."""


def main() -> None:
    options = option_parser(
        "farm engine --scripted",
        "A scripted engine, a double of an LLM server: it samples from a script, or random tokens.",
    ).parse_args()
    values = {name: getattr(options, name) for name in _OF_ENGINE}
    run(options, lambda model_text: ScriptedEngine(script_of(options), model_text=model_text, **values))


def run(options: argparse.Namespace, engine: Callable[[Path], ScriptedEngine]) -> None:
    """Serve an engine until a signal ends it; `engine` creates it, given the folder for its tokenizer."""
    # The server re-raises the signal at its end; as an exception it lets the folder be removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), TemporaryDirectory(prefix="farm-double-") as folder:
        app = engine(options.model_text or Path(folder)).app()
        serve(app, options.host, options.port, _say, keep_alive_s=options.keep_alive_s)


def _say(url: str) -> None:
    """Print the URL for programs, and the command that adds the engine to a farm for people."""
    print(url, flush=True)
    print(f"farm engines add {url}/v1", file=sys.stderr, flush=True)


def script_of(options: argparse.Namespace) -> Script | None:
    """Return the script to follow; None for random turns."""
    if options.random:
        return None
    return Script.read(options.book, options.seed) if options.book else Script([])


def option_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that every double has."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    answers = parser.add_argument_group("answers")
    answers.add_argument(
        "--book",
        type=Path,
        help="a script, as JSON lines: {match, branches: [{name, weight, turns}]}; without one, each answer gives up",
    )
    answers.add_argument("--random", action="store_true", help="random turns instead of a script")
    answers.add_argument("--mean-tokens", type=int, default=48, help="mean length of a random turn's text, in tokens")
    answers.add_argument("--seed", type=int, default=0)
    answers.add_argument("--context-tokens", type=int, default=1_000_000)
    answers.add_argument("--weight-version", default="0")
    server = parser.add_argument_group("the server")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=0, help="0 picks a free one")
    server.add_argument("--model", default=MODEL)
    server.add_argument("--model-text", type=Path, help="folder for the tokenizer. Default: a temporary one")
    server.add_argument("--keep-alive-s", type=float, default=5.0, help="idle connections are closed after this time")
    speed = parser.add_argument_group("speed", "0 means no limit")
    speed.add_argument("--latency-s", type=float, default=0.0)
    speed.add_argument("--prefill-per-s", type=float, default=0.0, help="prompt tokens per second that are not cached")
    speed.add_argument("--tokens-per-s", type=float, default=0.0, help="tokens per second of one call")
    speed.add_argument("--max-running", type=int, default=UNLIMITED)
    speed.add_argument("--max-queued", type=int, default=UNLIMITED)
    speed.add_argument("--cache-tokens", type=int, default=CACHE_TOKENS, help="capacity of the prefix cache")
    return parser


if __name__ == "__main__":
    main()
