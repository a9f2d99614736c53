"""Scores of answers by the scorers of verl, skyrl_gym, NeMo Gym and slime: `answer_rules_oracle.py scores < CASES`.

Their modules are imported without the packages around them, which would import training and serving code. Of NeMo
Gym's server, the functions and its `verify` are run, without the server.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import json
import re
import sys
import types
import unicodedata
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

from math_verify import grader
from math_verify.errors import TimeoutException
from math_verify.metric import math_metric
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

for name in ("verl", "skyrl_gym"):
    spec = find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    for package in (name, *(f"{name}.{inner}" for inner in ("utils", "utils.reward_score", "envs"))):
        module = types.ModuleType(package)
        module.__path__ = [str(root.joinpath(*package.split(".")[1:]))]
        sys.modules[package] = module


def functions(path: Path, method: str, imported: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the constants and functions of a module that is not imported, and one method, as a function.

    `imported` are names that the module imports from another.
    """
    tree = ast.parse(path.read_text())
    kept = [node for node in tree.body if isinstance(node, ast.Assign | ast.FunctionDef)]
    inner = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == method
    ]
    for node in inner:
        node.returns, node.decorator_list = None, []
        for argument in node.args.args:
            argument.annotation = None
    scope: dict[str, Any] = {
        **(imported or {}),
        **{"re": re, "unicodedata": unicodedata, "Any": Any, "Optional": Optional, "grader": grader},
        **{"MCQAVerifyResponse": SimpleNamespace, "TimeoutException": TimeoutException},
    }
    exec(compile(ast.Module([*kept, *inner], []), str(path), "exec"), scope)
    return scope


def of_gpqa(case: dict[str, Any]) -> float:
    return of_mcqa(case, GPQA)


def of_mcqa(case: dict[str, Any], server_of: dict[str, Any] | None = None) -> float:
    letters = "ABCDEFGHIJ"
    patterns = [each for each in (case["pattern"], *case["other_patterns"]) if each]
    template: dict[str, Any] = {"output_regex": patterns if len(patterns) > 1 else patterns[0]} if patterns else {}
    if case["prefix"]:
        template["answer_prefix"] = case["prefix"]
    body = SimpleNamespace(
        options=[{letters[at]: text} for at, text in enumerate(case["options"])],
        expected_answer=case["golds"][0],
        grading_mode=case["rule"],
        template_metadata=template or None,
        response=SimpleNamespace(output_text=case["response"]),
        model_dump=lambda exclude: {},
    )
    server = SimpleNamespace(config=SimpleNamespace(grading_mode=None))
    return float(asyncio.run((server_of or MCQA)["verify"](server, body)).reward)


gsm8k = import_module("verl.utils.reward_score.gsm8k")
math_dapo = import_module("verl.utils.reward_score.math_dapo")
math_reward = import_module("verl.utils.reward_score.math_reward")
# its counter of rollouts, of which only a name is used
sys.modules.setdefault("verl.utils.metric", SimpleNamespace(Metric=object))
prime_math = import_module("verl.utils.reward_score.prime_math")
search_r1 = import_module("verl.utils.reward_score.search_r1_like_qa_em")
skyrl_gsm8k = import_module("skyrl_gym.envs.gsm8k.utils")
skyrl_aime = import_module("skyrl_gym.envs.aime.utils")
skyrl_search = import_module("skyrl_gym.envs.search.utils")
servers = find_spec("resources_servers")
assert servers is not None
assert servers.submodule_search_locations is not None
servers_folder = Path(servers.submodule_search_locations[0])
MCQA = functions(servers_folder / "mcqa" / "app.py", "verify")
GPQA = functions(servers_folder / "gpqa_diamond" / "app.py", "verify", MCQA)
MATH = functions(servers_folder / "math_with_judge" / "app.py", "_strip_math_delimiters")
MATH["LibraryJudgeMathResourcesServer"] = SimpleNamespace(
    _strip_math_delimiters=MATH["_strip_math_delimiters"], _mute_output=contextlib.nullcontext
)


def of_library(case: dict[str, Any]) -> float:
    verifier = math_metric(
        gold_extraction_target=(LatexExtractionConfig(),),
        pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig()),
    )
    return float(MATH["_run_math_verify"](verifier, case["golds"][0], case["response"])[0])


TEXT = functions(servers_folder / "string_match" / "app.py", "verify")


def of_text(case: dict[str, Any]) -> float:
    mode = case["rule"].removeprefix("string_match_")
    answer = TEXT["_extract_answer"](case["response"].strip(), mode.removesuffix("_exact"))
    exact = mode.endswith("_exact")
    return float(TEXT["_answers_match"](answer, case["golds"][0], exact)) if answer is not None else 0.0


def of_slime(case: dict[str, Any]) -> float:
    """Score by slime's own choice of a rule; only the module of rewards is imported from its package."""
    root = Path(sys.prefix).parent / "slime" / "slime"
    for package, folder in (("slime", ""), ("slime.utils", "utils"), ("slime.rollout", "rollout")):
        module = sys.modules.setdefault(package, types.ModuleType(package))
        module.__path__ = [str(root / folder)]
    # code that calls a server, code that loads a user's function, and a type that is only named
    sys.modules.setdefault("aiohttp", SimpleNamespace(ClientSession=object))
    sys.modules.setdefault("slime.utils.misc", SimpleNamespace(load_function=None))
    sys.modules.setdefault("slime.utils.types", SimpleNamespace(Sample=object))
    rewards = import_module("slime.rollout.rm_hub")
    row = case["row"]
    sample = SimpleNamespace(
        custom_rm_path=None, response=case["response"], label=row["label"], metadata=dict(row["metadata"])
    )
    score = asyncio.run(rewards.async_rm(SimpleNamespace(custom_rm_path=None, rm_type=row["rm_type"]), sample))
    return float(score["score"] if isinstance(score, dict) else score)


SCORERS = {
    "math_verify": of_library,
    "gsm8k": lambda case: gsm8k.compute_score(case["response"], case["golds"][0]),
    "gsm8k_flexible": lambda case: gsm8k.compute_score(case["response"], case["golds"][0], method="flexible"),
    "skyrl_gsm8k": lambda case: skyrl_gsm8k.compute_score(case["response"], case["golds"][0]),
    "dapo": lambda case: math_dapo.compute_score(case["response"], case["golds"][0])["score"],
    "skyrl_aime": lambda case: skyrl_aime.compute_score(case["response"], case["golds"][0])["score"],
    "hendrycks_math": lambda case: math_reward.compute_score(case["response"], case["golds"][0]),
    "prime_math": lambda case: prime_math.compute_score(case["response"], case["golds"][0])[0],
    "search_r1": lambda case: search_r1.compute_score(case["response"], {"target": case["golds"]}),
    "skyrl_search": lambda case: skyrl_search.compute_score(case["response"], {"target": case["golds"]}),
}


def scorer_of(rule: str) -> Callable[[dict[str, Any]], float]:
    if rule.startswith("slime_"):
        return of_slime
    if rule.startswith("string_match_"):
        return of_text
    return {**SCORERS, "gpqa_diamond": of_gpqa}.get(rule, of_mcqa)


def main() -> None:
    answers = {}
    for name, case in json.load(sys.stdin)["cases"].items():
        with contextlib.redirect_stdout(io.StringIO()):
            answers[name] = {"value": float(scorer_of(case["rule"])(case))}
    json.dump(answers, sys.stdout)


main()
