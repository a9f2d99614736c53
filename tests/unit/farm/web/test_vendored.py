"""Vendored files are the reviewed ones, and pages load nothing from other servers."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import farm.web

STATIC = Path(farm.web.__file__).parent / "static"
TEMPLATES = STATIC.parent / "templates"
_ROW = re.compile(r"^\| (\S+\.(?:js|css)) \|.*\| ([0-9a-f]{64}) \|$", re.MULTILINE)


def test_vendored_files_have_the_recorded_digests_and_licences() -> None:
    written = dict(_ROW.findall((STATIC / "vendored" / "README.md").read_text()))
    there = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in STATIC.glob("vendored/*.??*")
        if path.suffix != ".md"
    }
    assert there == written
    assert there


def test_templates_have_no_inline_scripts_styles_or_addresses() -> None:
    for path in sorted(TEMPLATES.glob("*.html")):
        text = path.read_text()
        assert not re.search(r"(?:https?:)?//(?!www\.w3\.org)[a-z]", re.sub(r"\{#.*?#\}", "", text)), path.name
        assert not re.search(r"\son[a-z]+=", text), f"{path.name}: a handler in an attribute"
        if path.name != "static_rollout.html":
            assert "|safe" not in text, path.name
            assert "style=" not in text, path.name
        for script in re.findall(r"<script[^>]*>", text):
            assert 'src="{{ root }}/static/' in script or 'type="application/json"' in script, f"{path.name}: {script}"
