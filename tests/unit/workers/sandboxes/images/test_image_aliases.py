"""Names of base images: the images that they stand for, in any spelling."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.scratch_folder import sandbox_config
from tests.contract.sandboxes.sandbox_kinds import farm_in
from workers.sandboxes.images.image import alias_of, aliases, plain_name, remove_alias, set_alias


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with farm_in(tmp_path):
        yield tmp_path / "home"


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("ubuntu", "ubuntu:latest"),
        ("docker.io/library/ubuntu:24.04", "ubuntu:24.04"),
        ("docker.io/me/it", "me/it:latest"),
        ("host:5000/it", "host:5000/it:latest"),
        ("it@sha256:abc", "it@sha256:abc"),
    ],
)
def test_name_is_normalized(written: str, plain: str) -> None:
    assert plain_name(written) == plain


def test_alias_table_is_read(home: Path) -> None:
    config = sandbox_config()
    assert aliases(config) == {}
    set_alias(config, "ubuntu", "/images/ubuntu")
    set_alias(config, "debian:12", "host")
    set_alias(config, "library/debian:12", "/images/debian.sif")
    assert aliases(config) == {"debian:12": "/images/debian.sif", "ubuntu:latest": "/images/ubuntu"}
    assert alias_of(config, "docker.io/library/debian:12@sha256:1234") == "/images/debian.sif"
    assert alias_of(config, "debian:13") is None
    assert (remove_alias(config, "ubuntu"), remove_alias(config, "ubuntu")) == (True, False)
    assert sorted(path.name for path in home.iterdir()) == ["image_aliases.json"]
