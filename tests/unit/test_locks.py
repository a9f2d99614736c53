"""The two locks: the runtime lock is a subset of the test lock, hashes included, and covers all requirements."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distributions, metadata
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
MOST_OF_THE_CLIENT = 8
"""Direct dependencies of the client that a trainer installs."""


def normal(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


INSTALLED = {normal(each.metadata["Name"]) for each in distributions()}


def pins(name: str) -> dict[str, str]:
    """Return each package with its version and hashes, as they are in a lock."""
    blocks = re.findall(r"^[A-Za-z0-9][^\n]*\n(?:    [^\n]*\n)*", (ROOT / name).read_text(), flags=re.MULTILINE)
    return {normal(block): block for block in blocks}


def test_runtime_packages_are_pinned_as_in_the_test_lock() -> None:
    runtime, all_of_it = pins("requirements-runtime.lock"), pins("requirements.lock")
    assert len(runtime) > 50
    assert {name: block for name, block in runtime.items() if all_of_it.get(name) != block} == {}


def test_locked_packages_support_every_allowed_python() -> None:
    """The locks are made with one of these versions, and a package may require another."""
    oldest = f"{PROJECT['project']['requires-python'].removeprefix('>=')}.0"
    wanted = {name: metadata(name)["Requires-Python"] or "" for name in pins("requirements.lock") if name in INSTALLED}
    assert len(wanted) > 100
    assert {name: each for name, each in wanted.items() if not SpecifierSet(each).contains(oldest)} == {}


def test_client_has_few_dependencies() -> None:
    assert len(PROJECT["project"]["dependencies"]) <= MOST_OF_THE_CLIENT


def test_runtime_lock_has_all_requirements_and_no_test_packages() -> None:
    runtime = pins("requirements-runtime.lock")
    required = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["farm"]]
    assert {normal(each) for each in required} <= {*runtime}
    wanted_to_install = {"async-timeout", "editables", "hatchling"}
    dev = {normal(each) for each in PROJECT["dependency-groups"]["dev"]}
    assert dev & {*runtime} == wanted_to_install
