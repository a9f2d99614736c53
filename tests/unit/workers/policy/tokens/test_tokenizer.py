"""Tokenizers are read from published files, add nothing, and stream text in whole characters."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.workers.policy.tokens.zoo import CHATML, GEMMA, MISTRAL_V7, Model, trained
from workers.policy.tokens.tokenizer import TokenizerMissing, load, model_text
from workers.policy.tokens.tokenizer_files import NegativeCache, find

BOTH = (CHATML, MISTRAL_V7)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model as published, with a default template and one for tools."""
    trained(CHATML.specials).save(str(tmp_path / "tokenizer.json"))
    templates = [{"name": "default", "template": "{{ eos_token }}plain"}, {"name": "tool_use", "template": "tools"}]
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": None, "chat_template": templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<|endoftext|>"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    return tmp_path


def test_folder_is_read_with_all_its_end_tokens_and_templates(folder: Path) -> None:
    model = load(str(folder))
    assert model.tokenizer.end_ids == {0, 2}
    assert model.template.specials == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert model.template.render([], [], generation_prompt=True) == "<|im_end|>plain"
    assert model.template.render([], [{"type": "function"}], generation_prompt=True) == "tools"


def test_copies_are_one_model_and_other_templates_another(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy, other = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("other")
    for target in (copy, other):
        shutil.copytree(folder, target, dirs_exist_ok=True)
    (other / "chat_template.jinja").write_text("own")
    assert load(str(copy)) is load(str(folder))
    assert load(str(other)) is not load(str(folder))


def test_template_file_overrides_the_configuration(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("own")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("own tools")
    model = model_text(find(str(folder)), "own")
    assert model.template.source == "own"
    assert model.template.render([], [{"type": "function"}], generation_prompt=True) == "own tools"


def test_only_the_end_token_ends_a_turn_by_default(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert model_text(find(str(folder)), "x").tokenizer.end_ids == {2}


def test_hub_name_is_read_from_the_local_cache(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = tmp_path_factory.mktemp("hub")
    snapshot = cache / "models--someone--tiny" / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    refs = cache / "models--someone--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    files = find("someone/tiny", cache)
    assert model_text(files, "someone/tiny").tokenizer.end_ids == {0, 2}


def test_missing_files_are_reported_with_a_remedy(folder: Path) -> None:
    with pytest.raises(TokenizerMissing, match="--tokenizer FOLDER"):
        load("no/such/folder/anywhere")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerMissing, match=r"has no tokenizer\.json"):
        find(str(folder))


def test_broken_file_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerMissing, match=r"tokenizer\.json cannot be read"):
        load(str(folder))


def test_threads_share_one_load(folder: Path) -> None:
    start = threading.Barrier(8)

    def read() -> int:
        start.wait()
        return id(load(str(folder)))

    with ThreadPoolExecutor(8) as pool:
        assert len({future.result() for future in [pool.submit(read) for _ in range(8)]}) == 1


@pytest.mark.parametrize("model", BOTH, ids=lambda model: model.name)
def test_special_tokens_are_recognised_and_none_are_added(model: Model) -> None:
    tokenizer = model.text().tokenizer
    ids = tokenizer.encode(f"a list{model.eos}")
    assert ids.dtype == "int32"
    assert ids[-1] == tokenizer.id_of(model.eos)
    assert tokenizer.decode(ids) == f"a list{model.eos}"
    assert tokenizer.decode(ids, special=False) == "a list"
    assert tokenizer.decode(tokenizer.body(ids)) == "a list"


def test_text_within_a_prompt_gets_no_leading_space() -> None:
    tokenizer = MISTRAL_V7.text().tokenizer
    whole = tokenizer.encode("<s>the list")[1:].tolist()
    assert tokenizer.encode_within("the list").tolist() == whole
    assert tokenizer.encode("the list").tolist() != whole


@pytest.mark.parametrize("model", [*BOTH, GEMMA], ids=lambda model: model.name)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_stream_gives_the_text_in_whole_characters(model: Model, data: st.DataObject) -> None:
    tokenizer = model.text().tokenizer
    text = data.draw(st.text(alphabet="ab é漢🎉\n{}", max_size=60))
    ids = tokenizer.encode_within(text) if model.sentencepiece else tokenizer.encode(text)
    stream, given_out = tokenizer.stream(), ""
    rest = [int(token) for token in ids]
    while rest:
        n = data.draw(st.integers(1, len(rest)))
        piece = stream.feed(rest[:n])
        assert "\ufffd" not in piece
        given_out += piece
        rest = rest[n:]
        assert tokenizer.decode(ids).startswith(given_out)
    assert stream.feed([int(token) for token in tokenizer.end_ids]) == ""
    assert given_out + stream.end() == tokenizer.decode(ids)


@pytest.mark.parametrize("model", BOTH, ids=lambda model: model.name)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_stream_of_any_ids_gives_all_of_their_text(model: Model, data: st.DataObject) -> None:
    tokenizer = model.text().tokenizer
    # Byte fallback shows a run of bytes as broken from its beginning, even characters that were complete in it before.
    plain = st.integers(len(model.specials) + (257 if model.sentencepiece else 1), 380)
    pieces = data.draw(st.lists(st.lists(plain, min_size=1, max_size=6), max_size=12))
    stream = tokenizer.stream()
    text = "".join(stream.feed(piece) for piece in pieces) + stream.end()
    assert text == tokenizer.decode([token for piece in pieces for token in piece])


def test_long_run_of_broken_bytes_is_passed_on_eventually() -> None:
    tokenizer = CHATML.text().tokenizer
    broken = tokenizer.encode("ø")[:1].tolist()
    assert tokenizer.decode(broken) == "\ufffd"
    stream = tokenizer.stream()
    given_out = [stream.feed(broken) for _ in range(300)]
    assert given_out[:200] == [""] * 200
    assert len("".join(given_out)) > 200


def test_unknown_hub_name_is_looked_up_again_after_a_while() -> None:
    now = 1000.0
    misses = NegativeCache(lambda: now)
    misses.check("some/model")
    misses.add("some/model", TokenizerMissing("the hub cannot be reached"))
    misses.check("another/model")
    with pytest.raises(TokenizerMissing, match="cannot be reached"):
        misses.check("some/model")
    now += 1000.0
    misses.check("some/model")


def test_missing_name_is_not_looked_up_at_once(folder: Path, tmp_path: Path) -> None:
    misses = NegativeCache()
    misses.add("some/model", TokenizerMissing("the hub cannot be reached"))
    with pytest.raises(TokenizerMissing, match="cannot be reached"):
        find("some/model", tmp_path, misses)
    # a folder exists or not, and needs no such delay
    misses.add(str(folder), TokenizerMissing("the hub cannot be reached"))
    assert find(str(folder), tmp_path, misses).folder == folder
