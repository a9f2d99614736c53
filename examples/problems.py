"""Example problems as instances for submit: mathematics, functions, bug fixes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from farm.records.request import Instance

DATA = Path(__file__).parent / "data"
FAMILIES = ("chain_sum", "gcd", "lcm", "products", "prime_factorization", "simple_equations", "base_conversion")


def math_problems(families: Sequence[str] = FAMILIES, per_family: int = 4, seed: int = 0) -> list[Instance]:
    """Return entries of reasoning-gym; equal arguments give equal problems."""
    if not per_family:
        return []
    # Imported here, as it takes a second.
    import reasoning_gym

    instances = []
    for family in families:
        for index, entry in enumerate(reasoning_gym.create_dataset(family, size=per_family, seed=seed)):
            # In the form after JSON: tuples become lists.
            plain = json.loads(json.dumps(entry))
            fields = {"family": family, **{key: plain[key] for key in ("question", "answer", "metadata")}}
            instances.append(Instance(data_source="math", fields=fields, instance_id=f"{family}-{seed}-{index}"))
    return instances


def humaneval_problems(n: int = 164) -> list[Instance]:
    """Return the first n of 164 problems."""
    with gzip.open(DATA / "humaneval.jsonl.gz", "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file][:n]
    return [Instance(data_source="code", fields=fields, instance_id=fields["task_id"]) for fields in problems]


def swe_problems(ids: Sequence[str] | int | None = None) -> list[Instance]:
    """Return all, the first so many, or those with these ids. Raises KeyError for an unknown id."""
    lines = (DATA / "swe.jsonl").read_text(encoding="utf-8").splitlines()
    problems = {fields["instance_id"]: fields for fields in map(json.loads, lines)}
    chosen = list(problems)[:ids] if ids is None or isinstance(ids, int) else ids
    return [Instance(data_source="swe", fields=problems[name], instance_id=name) for name in chosen]
