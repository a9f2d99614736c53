"""`python -m tests.doubles` serves an engine double, and prints its URL (without `/v1`) once it listens."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from farm.errors import FarmError
from tests.doubles import FAULTS, EngineDouble
from tests.doubles.faults import rates
from workers.testing.engine.__main__ import option_parser, run, script_of


def main() -> None:
    options = _options()
    try:
        run(options, lambda model_text: _double(options, model_text))
    except FarmError as error:
        sys.exit(str(error))


def _double(options: argparse.Namespace, model_text: Path) -> EngineDouble:
    return EngineDouble(
        script_of(options),
        wire=options.wire,
        faults=rates(options.fault),
        retry_after_s=options.retry_after_s,
        slow_s=options.slow_s,
        version=options.vllm_version,
        key=options.key,
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
    )


def _options() -> argparse.Namespace:
    parser = option_parser("python -m tests.doubles", "A double of an LLM server that may fail.")
    wire = parser.add_argument_group("how it says it")
    wire.add_argument("--wire", choices=("vllm", "sglang", "openai"), default="vllm")
    wire.add_argument("--vllm-version", default="0.33.0")
    wire.add_argument("--key", default="", help="API key that it requires")
    faults = parser.add_argument_group("what goes wrong", "; ".join(f"{kind}: {text}" for kind, text in FAULTS.items()))
    faults.add_argument("--fault", action="append", default=[], metavar="KIND:SHARE", help="such as 500:0.1; repeat it")
    faults.add_argument("--retry-after-s", type=float, default=1.0, help="of 429")
    faults.add_argument("--slow-s", type=float, default=1.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
