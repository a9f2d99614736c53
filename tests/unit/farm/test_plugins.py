"""Plug-ins are found by name, also those installed while the process runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.client.request_checks import check_plugin
from farm.errors import InvalidRequest, NotFound
from farm.plugins import follows, installed, load
from workers.sandboxes.optional_protocols import (
    CopiesLayers,
    HasImageConfig,
    KeepsLayers,
    KnowsImages,
    ManagesFiles,
    SharesLayers,
    StartsAhead,
    StartsPrograms,
)

GROUP = "farm.tests"


def test_plug_in_that_is_installed_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NotFound, match=r"no farm\.tests plug-in 'later'.*restart nodes"):
        load(GROUP, "later")
    with pytest.raises(InvalidRequest, match="there is no agent 'later'"):
        check_plugin(GROUP, "later", "agent", "")
    (tmp_path / "later_plugin.py").write_text("PLUGIN = 7\n")
    info = tmp_path / "later-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: later\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nlater = later_plugin:PLUGIN\n")
    check_plugin(GROUP, "later", "agent", "")
    assert load(GROUP, "later") == 7
    with pytest.raises(NotFound, match="installed: later"):
        load(GROUP, "never")


class _Bare:
    pass


class _Whole:
    kind = "whole"

    def absent_image(self, spec: object) -> None: ...

    def image_config(self) -> None: ...


class _Late(_Bare):
    def __init__(self) -> None:
        self.absent_image = lambda spec: None


class _Refused(_Whole):
    absent_image = None  # type: ignore[assignment]


class _Passing:
    def __getattr__(self, name: str) -> object:
        return lambda *given: None


@pytest.mark.parametrize("plugin", [_Bare(), _Whole(), _Late(), _Refused(), _Passing(), object(), None, _Whole])
def test_follows_agrees_with_isinstance(plugin: object) -> None:
    for protocol in (KnowsImages, HasImageConfig, CopiesLayers):
        assert follows(plugin, protocol) == isinstance(plugin, protocol), protocol


def test_follows_agrees_with_isinstance_for_every_sandbox() -> None:
    protocols = [SharesLayers, StartsAhead, KeepsLayers, CopiesLayers, KnowsImages, StartsPrograms, ManagesFiles]
    kinds = [load("farm.sandboxes", name) for name in installed("farm.sandboxes")]
    assert {follows(kind, protocol) for kind in kinds for protocol in protocols} == {True, False}
    assert all(follows(kind, protocol) == isinstance(kind, protocol) for kind in kinds for protocol in protocols)
