"""slime's own evaluation loop on the farm: `slime_evaluation.py FARM_URL SLIME MODEL`.

The arguments are those that slime's own parser makes: its defaults, evaluation options, its example
`scripts/run-qwen3-4B.sh`, and a file for `--eval-config`. SLIME is the folder of its source, MODEL has a tokenizer.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from absent_modules import leave_out  # type: ignore[import-not-found]
from problems_of_tests import chat  # type: ignore[import-not-found]

import farm
from farm.adapters.slime import generate_function
from farm.errors import InvalidRequest

leave_out("sglang", "sglang_router", "megatron", "wandb")
URL, SLIME, MODEL = sys.argv[1:4]

from slime.rollout.sglang_rollout import (  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
    generate_rollout,
)
from slime.utils.arguments import (  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
    _resolve_eval_datasets,
    get_slime_extra_args_provider,
)

DATA = Path("problems.jsonl")
OF_EXAMPLE = ("ROLLOUT_ARGS", "EVAL_ARGS", "GRPO_ARGS")


def connect() -> Any:
    return farm.connect(URL)


generate = generate_function(connect, "slime-evaluation", settings={"max_attempts": 1})


def parsed(*words: str) -> argparse.Namespace:
    """Return slime's arguments, by its own parser, with those that its engines' parsers would add."""
    parser = argparse.ArgumentParser(add_help=False)
    get_slime_extra_args_provider()(parser)
    needed = ["--rollout-batch-size", "2", "--rollout-num-gpus", "1", "--hf-checkpoint", MODEL]
    keys = ["--input-key", "prompt", "--label-key", "label", "--apply-chat-template"]
    seam = ["--custom-generate-function-path", "slime_evaluation.generate"]
    args, unknown = parser.parse_known_args([*needed, *keys, *words, *seam])
    assert unknown == [], unknown
    args.sglang_server_concurrency, args.sglang_dp_size = 8, 1
    args.eval_datasets = _resolve_eval_datasets(args)
    return args


def of_example() -> list[str]:
    """Return the words of slime's example, with the data set of these tests in place of its own."""
    text = (Path(SLIME) / "scripts/run-qwen3-4B.sh").read_text()
    words: list[str] = []
    for name in OF_EXAMPLE:
        found = re.search(rf"^{name}=\(\n(.*?)^\)", text, re.MULTILINE | re.DOTALL)
        assert found is not None, name
        words += shlex.split(found[1], comments=True)
    place = words.index("--eval-prompt-data")
    return [*words[: place + 1], "aime", str(DATA), *words[place + 3 :]]


def evaluated(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's requests in slime's evaluation, and slime's own result."""
    output = generate_rollout(args, 3, None, evaluation=True)
    facts = {}
    with farm.connect(URL) as client:
        for name, result in output.data.items():
            ids = [sample.metadata["farm_rollout_id"] for sample in result["samples"]]
            calls = [client.calls(rollout_id)[0] for rollout_id in ids]
            facts[name] = {
                "rewards": result["rewards"],
                "indices": [sample.index for sample in result["samples"]],
                "batches": len({rollout_id.partition(".")[0] for rollout_id in ids}),
                "sampling": [dict(call.sampling) for call in calls],
            }
    return facts


def refusal(args: argparse.Namespace) -> str:
    try:
        generate_rollout(args, 3, None, evaluation=True)
    except InvalidRequest as error:
        return error.field
    return ""


def main() -> None:
    """Evaluate with each set of arguments; print the results."""
    sys.modules["slime_evaluation"] = sys.modules["__main__"]
    rows = [
        {
            "prompt": [{"role": "user", "content": "How many hops?"}],
            "label": "three",
            "metadata": {"farm_instance": chat(name).model_dump()},
        }
        for name in ("a", "b")
    ]
    DATA.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = ["--eval-prompt-data", "own", str(DATA), "--n-samples-per-eval-prompt", "2"]
    example = of_example()
    place = example.index("--rm-type")
    config = {
        "eval": {
            "defaults": {"temperature": 0.3, "stop": ["END"]},
            "datasets": [
                {"name": "first", "path": str(DATA), "top_k": 7, "repetition_penalty": 1.1, "max_response_len": 33},
                {"name": "second", "path": str(DATA), "min_new_tokens": 2, "n_samples_per_eval_prompt": 3},
            ],
        }
    }
    Path("evaluation.json").write_text(json.dumps(config))
    other_template = {"datasets": [{"name": "x", "path": str(DATA), "apply_chat_template_kwargs": {"thinking": False}}]}
    Path("template.json").write_text(json.dumps(other_template))
    facts = {
        "default": evaluated(parsed(*evaluation)),
        "options": evaluated(
            parsed(
                *("--rollout-temperature", "1.0", "--rollout-max-response-len", "64", "--rollout-stop", "STOP"),
                *("--eval-temperature", "0.2", "--eval-top-p", "0.7", "--eval-top-k", "20"),
                *("--eval-max-response-len", "48", "--eval-min-new-tokens", "1"),
                *evaluation,
            )
        ),
        "example": evaluated(parsed(*example[:place], *example[place + 2 :])),
        "config": evaluated(parsed("--eval-config", "evaluation.json")),
        "refused": [
            refusal(parsed(*example)),
            refusal(parsed(*evaluation, "--custom-rm-path", "my.rm")),
            refusal(parsed("--eval-config", "template.json")),
        ],
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
