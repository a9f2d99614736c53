"""Images that are known to be missing: by their files, or by a registry's answer; all others may exist."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from farm.settings import settings
from testkit.deadline import LONG_S
from testkit.scratch_folder import sandbox_config
from tests.services.servers.registry import registry
from workers.config import SandboxConfig
from workers.sandboxes import absent_images
from workers.sandboxes.absent_images import absent_image
from workers.sandboxes.images.image import set_alias

UNKNOWN = f"x@sha256:{'0' * 64}"


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "files").mkdir()
    monkeypatch.setenv("FARM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    settings.cache_clear()
    # a busy machine's own registry needs time
    monkeypatch.setattr(absent_images, "REGISTRY_S", LONG_S)
    absent_images._may_be_there.clear()
    yield
    monkeypatch.undo()
    settings.cache_clear()


FILES = ("{}.sif", "oci-archive:{}.tar", "docker-archive:{}.tar:tag", "{}", "{}.def", "{}.tar.gz")


@pytest.mark.parametrize("name", FILES)
def test_missing_files_are_reported(tmp_path: Path, name: str, config: SandboxConfig) -> None:
    image = name.format(tmp_path / "nothing")
    assert f"there is no {tmp_path / 'nothing'}" in absent_image(config, image, {})
    assert image in absent_image(config, image, {})
    for suffix in ("", ".sif", ".tar", ".def", ".tar.gz"):
        (tmp_path / f"nothing{suffix}").touch()
    assert absent_image(config, image, {}) == ""


def test_contexts_of_dockerfiles_are_checked(tmp_path: Path, config: SandboxConfig) -> None:
    assert "Dockerfile" in absent_image(config, f"dockerfile:{tmp_path}", {})
    (tmp_path / "Other").touch()
    assert absent_image(config, f"dockerfile:{tmp_path}#Other#stage", {}) == ""


@pytest.mark.parametrize(
    "name", ["host", "ubuntu:24.04", "relative/folder", "some.sif", "oci-archive:x.tar", "oras://a/b"]
)
def test_images_that_cannot_be_checked_may_exist(name: str, config: SandboxConfig) -> None:
    assert absent_image(config, name, {}) == ""


def test_cached_image_is_checked_by_its_key(config: SandboxConfig) -> None:
    assert "no image 'abc' in the cache" in absent_image(config, "cached:abc", {})


def test_registry_is_queried_for_the_manifest(tmp_path: Path, config: SandboxConfig) -> None:
    with registry(tmp_path / "files") as (host, content):
        assert absent_image(config, f"{host}/a/b:1", {}) == ""
        assert content.requested_paths == ["/v2/a/b/manifests/1"]
        place = host.removeprefix("docker://")
        reason = absent_image(config, f"{host}/{UNKNOWN}", {})
        assert reason.startswith(f"the registry {place} has no image {host}/{UNKNOWN}")
        set_alias(config, f"{place}/{UNKNOWN}", "host")
        assert absent_image(config, f"{host}/{UNKNOWN}", {}) == ""


def test_other_answers_of_a_registry_report_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert absent_image(sandbox_config(), "docker://127.0.0.1:9/x", {}) == ""
    with registry(tmp_path / "files") as (host, content):
        content.status = 401
        assert absent_image(sandbox_config(), f"{host}/{UNKNOWN}", {}) == ""
        content.status = None
        monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", "of-somebody")
        assert absent_image(sandbox_config(), f"{host}/{UNKNOWN}", {}) == ""
        monkeypatch.delenv("APPTAINER_DOCKER_PASSWORD")
        (tmp_path / ".docker").mkdir()
        (tmp_path / ".docker/config.json").write_text(json.dumps({"auths": {host.removeprefix("docker://"): {}}}))
        absent_images._may_be_there.clear()
        assert absent_image(sandbox_config(), f"{host}/{UNKNOWN}", {}) == ""
        (tmp_path / ".docker/config.json").unlink()
        absent_images._may_be_there.clear()
        assert absent_image(sandbox_config(), f"{host}/{UNKNOWN}", {}) != ""
