"""The class attributes of an environment, as the node reads them."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from farm.errors import HandlerError, NotFound
from workers.environments.environment_program import (
    FOLDER,
    EnvironmentProgram,
    environment_names,
    environment_program,
)


def kind(**attributes: Any) -> type[Any]:
    return type("Kind", (), attributes)


def test_class_without_attributes_needs_nothing() -> None:
    program = EnvironmentProgram.of("it", kind())
    spec = program.spec()
    assert (spec.packages, spec.network, spec.image, program.shared) == ((), False, "host", True)
    assert spec.env["PYTHONPATH"] == FOLDER
    assert spec.env["PYTHONHASHSEED"] == "0"
    assert spec.limits.memory_mb > program.memory_mb


def test_range_of_rewards_is_two_finite_numbers() -> None:
    assert EnvironmentProgram.of("it", kind()).rewards is None
    assert EnvironmentProgram.of("it", kind(rewards=[-1, 2])).rewards == (-1.0, 2.0)


def test_environment_with_a_network_has_its_own_sandbox() -> None:
    assert not EnvironmentProgram.of("it", kind(network=True)).shared
    assert not EnvironmentProgram.of("it", kind(network=True, shared=False)).shared
    with pytest.raises(ValueError, match="network = True needs shared = False"):
        EnvironmentProgram.of("it", kind(network=True, shared=True))


def test_packages_of_an_instance_are_added_to_those_of_the_environment() -> None:
    program = EnvironmentProgram.of("it", kind(packages=("a==1",), without_dependencies=True))
    spec = program.spec(("b==2", "a==1"))
    assert (spec.packages, spec.without_dependencies) == (("a==1", "b==2"), True)


@pytest.mark.parametrize(
    "attributes",
    [
        *({"packages": "a==1"}, {"imports": (1,)}, {"packages": ("a",)}, {"env": 1}),
        *({"rewards": 1}, {"rewards": (1, 0)}, {"rewards": (0, float("inf"))}, {"rewards": (0,)}, {"rewards": "ab"}),
        *({"rewards": (float("nan"), 1)}, {"rewards": (0, 1, 2)}, {"rewards": (None, 1)}),
    ],
)
def test_invalid_attributes_are_refused(attributes: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        EnvironmentProgram.of("it", kind(**attributes))


def test_each_installed_environment_has_its_sources() -> None:
    assert {"gem", "nemo_gym", "openenv", "reasoning_gym", "skyrl_gym", "textarena", "verifiers"} <= set(
        environment_names()
    )
    for name in environment_names():
        program = environment_program(name)
        sources = program.sources()
        assert f"{program.module.replace('.', '/')}.py" in sources
        assert "workers/environments/environment_server.py" in sources
        assert all(path.is_file() for path in sources.values())
        trees = [ast.parse(path.read_text()) for path in sources.values()]
        imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        of_the_farm = {str(node.module) for node in imports if str(node.module).startswith(("workers.", "farm."))}
        assert {f"{module.replace('.', '/')}.py" for module in of_the_farm} <= {*sources}, name


def test_module_without_a_source_is_named() -> None:
    for module in ("itertools", "nowhere", "workers.environments"):
        program = EnvironmentProgram("it", "workers.environments.environment", "Step", modules=(module,))
        with pytest.raises(HandlerError, match=module):
            program.sources()


def test_unknown_environment_is_not_found() -> None:
    with pytest.raises(NotFound, match="gem"):
        environment_program("juggling")
