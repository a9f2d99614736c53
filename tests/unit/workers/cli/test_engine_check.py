from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.doubles import EngineDouble
from workers.cli.engine_check import main
from workers.testing.serving import serving


def doctor(*words: str, **made: Any) -> Result:
    with serving(EngineDouble(**made).app()) as url:
        return CliRunner().invoke(main, [f"{url}/v1", *words], env={"COLUMNS": "160"})


def test_complete_engine_is_token_exact() -> None:
    result = doctor()
    assert result.exit_code == 0, result.output
    for part in ("vllm 0.33.0", "/inference/v1/generate", "splits text as the engine does", "written as hermes"):
        assert part in result.output
    assert "rollouts on it are token-exact" in result.output


def test_missing_features_have_a_remedy() -> None:
    result = doctor(version="0.32.0", scale_out=False, control=False)
    assert result.exit_code == 0
    assert "VLLM_SERVER_DEV_MODE=1" in result.output
    assert "--enable-scale-out" in result.output
    assert "it lacks: weight versions, control" in result.output


def test_text_only_server_is_reported_with_its_missing_features() -> None:
    result = doctor(wire="openai")
    assert result.exit_code == 0
    assert "no: text only" in result.output
    assert "it lacks: token ids in, token ids out" in result.output


def test_findings_are_printed_as_json() -> None:
    result = json.loads(doctor("--json").output)
    assert result["info"]["token_in"] == "generate"
    assert all(finding["ok"] for finding in result["findings"])


def test_missing_tokenizer_is_reported(tmp_path: Any) -> None:
    result = doctor("--tokenizer", str(tmp_path))
    assert result.exit_code == 0
    assert "it lacks: tokenizer" in result.output


@pytest.mark.parametrize("written", ["{}", "{}/", "{}/v1/", " {}/v1"])
def test_address_with_v1_is_accepted(written: str) -> None:
    with serving(EngineDouble(wire="openai").app()) as url:
        result = CliRunner().invoke(main, [written.format(url), "--json"])
    assert result.exit_code == 0, result.output
    value = json.loads(result.output)
    assert value["url"] == f"{url}/v1"
    assert not any("chat fails" in note for note in value["info"]["notes"])


def test_key_is_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-12345\n")
    words = ("--key-file", str(file))
    for shown in (doctor(*words, key="sk-12345"), doctor(*words, "--json", key="sk-12345")):
        assert shown.exit_code == 0, shown.output
        assert "sk-12345" not in shown.output
    result = doctor(*words, key="another")
    assert result.exit_code == 1
    assert "API key" in result.output
    assert "sk-12345" not in result.output


def test_unreachable_engine_is_an_error() -> None:
    with serving(EngineDouble().app()) as url:
        pass
    result = CliRunner().invoke(main, [f"{url}/v1"])
    assert result.exit_code == 1
    assert "EngineError" in result.output
    assert "cannot be reached" in result.output
