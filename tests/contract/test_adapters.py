"""Every trainer adapter keeps its promises: the built-in ones, and one of another package.

`farm doctor --adapter NAME` checks an adapter of another trainer, wherever it is installed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farm import plugins
from farm.adapters.conformance.adapter_promises import every_kind, examine_adapter
from farm.adapters.protocol import training_rows
from farm.client.farm import ADAPTERS
from farm.errors import NotFound

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer_adapter"
NAMES = ("arrays", "openrlhf", "packed", "skyrl", "slime", "trl", "verl")


@pytest.fixture(scope="module", autouse=True)
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Build and install the example package, like any other package."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([*command, "--no-build-isolation", "--target", str(site), str(EXAMPLE)], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield
    sys.modules.pop("packed_rows", None)
    plugins.find_installed()
    plugins.load.cache_clear()


def test_only_trainable_rows_are_selected() -> None:
    rows = [(rollout.rollout_id[-3:], len(each.prompt_ids)) for rollout, each in training_rows(every_kind())]
    first = [("0.0", 2), ("0.1", 3), ("0.1", 4), ("0.1", 1), ("1.0", 2)]
    assert rows == [*first, ("2.1", 9), ("3.1", 2), ("5.0", 512), ("5.1", 1)]
    rows = [(rollout.rollout_id[-3:], len(each.prompt_ids)) for rollout, each in training_rows(every_kind(), 7)]
    assert rows == [*first, ("5.0", 512), ("5.1", 1)]


@pytest.mark.parametrize("name", NAMES)
def test_adapter_keeps_its_promises(name: str) -> None:
    results = list(examine_adapter(plugins.load(ADAPTERS, name)))
    assert len(results) == 10
    assert {each.promise: each.fault for each in results if not each.ok} == {}


def test_every_built_in_adapter_is_tested() -> None:
    plugins.load(ADAPTERS, "packed")
    assert {*plugins.installed(ADAPTERS)} >= {*NAMES}
    own = {name for name, point in plugins.installed(ADAPTERS).items() if point.value.startswith("farm.")}
    # those that return results need their trainers' own packages: `make test-trainers`
    assert own <= {*NAMES, "rllm", "verifiers"}


def test_missing_adapter_is_named_with_the_installed_ones() -> None:
    with pytest.raises(NotFound, match=r"'none-such'.*arrays, .*packed"):
        plugins.load(ADAPTERS, "none-such")
