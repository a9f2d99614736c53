"""`python -m workers.testing.engine` serves a scripted engine, and prints its URL (without `/v1`) once it listens."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from farm.errors import FarmError
from workers.testing.book import PlayBook
from workers.testing.engine import EngineDouble
from workers.testing.engine.double import MODEL
from workers.testing.engine.faults import FAULTS, rates
from workers.testing.engine.prefix_cache import CACHE_TOKENS
from workers.testing.engine.scheduler import UNLIMITED
from workers.testing.serving import serve


def main(words: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(words)
    # The server hands a signal on when it has ended; as an exception it lets the folder be removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt), TemporaryDirectory(prefix="farm-double-") as folder:
            double = _double(options, options.model_text or Path(folder))
            serve(
                double.app(),
                options.host,
                options.port,
                lambda url: print(url, flush=True),
                keep_alive_s=options.keep_alive_s,
            )
    except FarmError as error:
        sys.exit(str(error))


def _double(options: argparse.Namespace, model_text: Path) -> EngineDouble:
    book = None if options.random else PlayBook.read(options.book, options.seed) if options.book else PlayBook([])
    return EngineDouble(
        book,
        wire=options.wire,
        model=options.model,
        model_text=model_text,
        seed=options.seed,
        latency_s=options.latency_s,
        prefill_per_s=options.prefill_per_s,
        tokens_per_s=options.tokens_per_s,
        max_running=options.max_running,
        max_queued=options.max_queued,
        context_tokens=options.context_tokens,
        cache_tokens=options.cache_tokens,
        weight_version=options.weight_version,
        mean_tokens=options.mean_tokens,
        faults=rates(options.fault),
        retry_after_s=options.retry_after_s,
        slow_s=options.slow_s,
        version=options.vllm_version,
        key=options.key,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="farm engine --scripted", description="A test double of an LLM server: it plays a book, or random tokens."
    )
    what = parser.add_argument_group("what it says")
    what.add_argument(
        "--book", type=Path, help="JSON lines: {match, plays: [{name, weight, turns}]}; without, it gives up"
    )
    what.add_argument("--random", action="store_true", help="random turns in place of a book")
    what.add_argument("--mean-tokens", type=int, default=48, help="length of a random turn's text")
    what.add_argument("--seed", type=int, default=0)
    what.add_argument("--context-tokens", type=int, default=1_000_000)
    what.add_argument("--weight-version", default="0")
    wire = parser.add_argument_group("how it says it")
    wire.add_argument("--wire", choices=("vllm", "sglang", "openai"), default="vllm")
    wire.add_argument("--vllm-version", default="0.33.0")
    wire.add_argument("--host", default="127.0.0.1")
    wire.add_argument("--port", type=int, default=0, help="0 takes a free one")
    wire.add_argument("--model", default=MODEL)
    wire.add_argument("--model-text", type=Path, help="folder to write the tokenizer to; without, a temporary one")
    wire.add_argument("--key", default="", help="API key that it wants")
    speed = parser.add_argument_group("how fast", "0 is without limit")
    speed.add_argument("--latency-s", type=float, default=0.0)
    speed.add_argument("--prefill-per-s", type=float, default=0.0, help="prompt tokens that no cache holds")
    speed.add_argument("--tokens-per-s", type=float, default=0.0, help="of one call")
    speed.add_argument("--max-running", type=int, default=UNLIMITED)
    speed.add_argument("--max-queued", type=int, default=UNLIMITED)
    speed.add_argument("--cache-tokens", type=int, default=CACHE_TOKENS, help="room of the prefix cache")
    faults = parser.add_argument_group("what goes wrong", "; ".join(f"{kind}: {text}" for kind, text in FAULTS.items()))
    faults.add_argument("--fault", action="append", default=[], metavar="KIND:SHARE", help="such as 500:0.1; repeat it")
    faults.add_argument("--retry-after-s", type=float, default=1.0, help="of 429")
    faults.add_argument("--slow-s", type=float, default=1.0)
    faults.add_argument("--keep-alive-s", type=float, default=5.0, help="idle connections are closed after that")
    return parser


if __name__ == "__main__":
    main()
