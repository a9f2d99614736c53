"""The packages of the farm's environment that go into a sandbox."""

from __future__ import annotations

from workers.sandboxes.kernel.python_runtime import closure


def test_ipython_and_what_it_imports() -> None:
    names = set(closure("IPython"))
    assert {"ipython", "traitlets", "prompt-toolkit", "stack-data", "executing"} <= names


def test_nothing_that_is_only_an_extra() -> None:
    assert not {"pytest", "numpy", "jupyter-client", "rollout-farm"} & set(closure("IPython"))


def test_what_is_not_installed_is_for_another_platform() -> None:
    assert closure("no-such-distribution") == {}
