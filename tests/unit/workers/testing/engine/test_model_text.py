from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from workers.testing.engine.model_text import (
    END,
    MARKS,
    SPECIAL_TOKENS,
    VOCABULARY_SIZE,
    make_tokenizer,
    write_model_text,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model_text(path)
    return path


def test_model_folder_is_reproducible(folder: Path, tmp_path: Path) -> None:
    make_tokenizer.cache_clear()
    write_model_text(tmp_path)
    names = {path.name for path in folder.iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
    assert all((folder / name).read_bytes() == (tmp_path / name).read_bytes() for name in names)


def test_vocabulary_is_complete(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCABULARY_SIZE
    for text in (*SPECIAL_TOKENS, *MARKS):
        assert tokenizer.encode(f"a{text}b", add_special_tokens=False).tokens == ["a", text, "b"]
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == ("" if text in SPECIAL_TOKENS else text)
    end = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.token_to_id(END) in end
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == END


def test_words_are_merged() -> None:
    text = "The function is wrong, so the test fails."
    assert len(make_tokenizer().encode(text, add_special_tokens=False).ids) < len(text) / 2


@given(st.text())
def test_any_text_survives_a_round_trip(text: str) -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text
