"""Names of base images: the images that they stand for, in any spelling."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
    assert aliases() == {}
    set_alias("ubuntu", "/images/ubuntu")
    set_alias("debian:12", "host")
    set_alias("library/debian:12", "/images/debian.sif")
    assert aliases() == {"debian:12": "/images/debian.sif", "ubuntu:latest": "/images/ubuntu"}
    assert alias_of("docker.io/library/debian:12@sha256:1234") == "/images/debian.sif"
    assert alias_of("debian:13") is None
    assert (remove_alias("ubuntu"), remove_alias("ubuntu")) == (True, False)
    assert sorted(path.name for path in home.iterdir()) == ["image_aliases.json"]
