"""TRL's own script for GRPO, `trl grpo`, runs on the farm: `trl_script.py FARM_URL MODEL_TEXT`.

The script is that of the installed TRL, with lines for the farm inserted.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

from datasets import Dataset
from problems_of_tests import breaking, chat  # type: ignore[import-not-found]
from small_policy import write_policy  # type: ignore[import-not-found]
from trl.scripts import grpo

URL, MODEL_TEXT = sys.argv[1:]
STEPS = 3
ADDED = {
    "    import transformers\n": "    import farm\n",
    "    from packaging.version import Version\n": "    from farm.adapters.trl import prompt_key, rollout_func\n",
    "    # Initialize the GRPO trainer\n": (
        "    rows = dataset[script_args.dataset_train_split]\n"
        '    instances = {prompt_key(row["prompt"]): farm.Instance.model_validate_json(row["farm_instance"]) '
        "for row in rows}\n"
    ),
    "        args=training_args,\n": (
        f'        rollout_func=rollout_func(farm.connect({URL!r}), instances, run="trl-script", max_attempts=1),\n'
    ),
}
"""Lines for the farm, each before a line of the script."""


def main() -> None:
    """Train, and print TRL's log."""
    write_policy(MODEL_TEXT, "policy")
    problems = [chat("a"), breaking("b"), chat("c"), chat("d")]
    rows = [
        {
            "prompt": [{"role": "user", "content": f"problem {instance.instance_id}"}],
            "farm_instance": instance.model_dump_json(),
        }
        for instance in problems
    ]
    Path("data").mkdir()
    Dataset.from_list(rows).to_json("data/train.jsonl")
    text = Path(grpo.__file__).read_text()
    for line, added in ADDED.items():
        assert text.count(line) == 1, line
        text = text.replace(line, added + line)
    Path("script.py").write_text(text)
    sys.argv = ["script.py", *options()]
    runpy.run_path("script.py", run_name="__main__")
    state = json.loads(Path(f"out/checkpoint-{STEPS}/trainer_state.json").read_text())
    logs = [entry for entry in state["log_history"] if "reward" in entry]
    n_added = sum(added.count("\n") for added in ADDED.values())
    print(json.dumps({"steps": [entry["step"] for entry in logs], "logs": logs, "added": n_added}))


def options() -> list[str]:
    """Return the script's own options."""
    return [
        *("--model_name_or_path", "policy", "--dataset_name", "data", "--output_dir", "out"),
        *("--reward_funcs", "farm.adapters.trl.reward_from_farm", "--max_completion_length", "64"),
        *("--num_generations", "4", "--per_device_train_batch_size", "16", "--max_steps", str(STEPS)),
        *("--use_cpu", "--bf16", "false", "--dtype", "float32", "--report_to", "none", "--logging_steps", "1"),
        *("--save_steps", str(STEPS), "--disable_tqdm", "true", "--learning_rate", "0.01"),
    ]


main()
