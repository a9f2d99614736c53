"""The README says nothing that is not so: its files exist, its commands too, and its handler is one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from farm.cli import main
from workers.interfaces import Submission
from workers.testing.chat import ContainsEvaluator

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_files_it_names_exist() -> None:
    named = set(re.findall(r"`((?:farm|workers|tests|examples|alembic|docker|benchmarks)/[\w./-]*)`", README))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_commands_it_names_exist() -> None:
    named = set(re.findall(r"(?:^|`|· )farm ([a-z]+)", README, re.MULTILINE))
    assert named >= {"up", "node", "submit", "watch", "show", "collect", "cancel", "doctor", "flower", "migrate"}
    assert named <= set(main.commands)


def test_the_make_targets_it_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_its_handler_is_one() -> None:
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "CapitalHandler" in block)
    names: dict[str, Any] = {
        "BaseModel": BaseModel,
        "ConfigDict": ConfigDict,
        "Submission": Submission,
        "ContainsEvaluator": ContainsEvaluator,
    }
    exec(code, names)
    handler = names["CapitalHandler"]()
    instance = handler.instance_type.model_validate({"country": "Peru", "capital": "Lima"})
    assert handler.messages(instance) == [{"role": "user", "content": "What is the capital of Peru?"}]
    assert handler.sandbox(instance) is None
    assert handler.evaluator(instance).name == "contains"
