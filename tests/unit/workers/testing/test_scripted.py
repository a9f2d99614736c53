from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from workers.testing import tokenizer
from workers.testing.book import DONE, GIVE_UP, Play, PlayBook, Problem, ScriptedCall, Turn
from workers.testing.scripted import FINGERPRINT, ScriptedServer
from workers.testing.serving import serving


def play(name: str, weight: float = 1.0) -> Play:
    call = ScriptedCall(name="python", arguments={"code": f"'{name}'"})
    return Play(name=name, weight=weight, turns=(Turn(content="look", tool_calls=(call,)), Turn(content=name)))


BOOK = [Problem(match="2 + 2", plays=(play("right"), play("wrong"), play("rare", 0.5)))]
ASKED = [{"role": "user", "content": "What is 2 + 2?"}]


def message(turn: Turn) -> dict[str, Any]:
    calls = [{"id": "x", "function": {"name": call.name, "arguments": call.text}} for call in turn.tool_calls]
    return {"role": "assistant", "content": turn.content or None, **({"tool_calls": calls} if calls else {})}


def whole_play(book: PlayBook, seed: int | None) -> str:
    """What the second turn says, which is the play's name."""
    first = book.next_turn(ASKED, seed)
    history = [*ASKED, message(first), {"role": "tool", "tool_call_id": "x", "content": "..."}]
    second = book.next_turn(history, seed)
    assert first.tool_calls[0].text == json.dumps({"code": f"'{second.content}'"})
    assert book.next_turn([*history, message(second)], seed) == DONE
    return second.content


def test_a_play_goes_on_as_it_began() -> None:
    book = PlayBook(BOOK)
    assert {whole_play(book, seed) for seed in range(40)} == {"right", "wrong", "rare"}
    assert {whole_play(book, None) for _ in range(40)} == {"right", "wrong", "rare"}


def test_the_seed_decides_whatever_came_before() -> None:
    first, second = PlayBook(BOOK, seed=3), PlayBook(BOOK, seed=3)
    whole_play(second, 99)
    assert [whole_play(first, seed) for seed in range(10)] == [whole_play(second, seed) for seed in range(10)]


def test_weights() -> None:
    counts = Counter(whole_play(PlayBook(BOOK), seed) for seed in range(500))
    assert 160 < counts["right"] < 240
    assert 60 < counts["rare"] < 140


def test_unknown_problems_and_foreign_histories_are_given_up() -> None:
    book = PlayBook(BOOK)
    assert book.next_turn([{"role": "user", "content": "What is 3 + 3?"}], 0) == GIVE_UP
    assert book.next_turn([*ASKED, {"role": "assistant", "content": "who knows"}], 0) == GIVE_UP


def test_the_longest_match_counts() -> None:
    longer = Problem(match="What is 2 + 2?", plays=(Play(name="long", turns=(Turn(content="long"),)),))
    assert PlayBook([*BOOK, longer]).next_turn(ASKED, 0).content == "long"


@pytest.mark.parametrize("text", ["plain", "naïve ✓ 漢字", ""])
@pytest.mark.parametrize("calls", [(), (ScriptedCall(name="bash", arguments={"command": "echo 'ü'"}),)])
def test_turns_extend_each_other(text: str, calls: tuple[ScriptedCall, ...]) -> None:
    answer = message(Turn(content=text, tool_calls=calls))
    prompt = tokenizer.prompt_ids(ASKED, [])
    response, whole = tokenizer.response_ids(answer, 10_000)
    later = tokenizer.prompt_ids([*ASKED, answer, {"role": "tool", "content": "4"}], [])
    assert whole
    assert response[-1] == tokenizer.END
    assert later[: len(prompt) + len(response)] == prompt + response


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_cut_responses_extend_too(max_tokens: int) -> None:
    response, whole = tokenizer.response_ids({"role": "assistant", "content": "a✓b漢字"}, max_tokens)
    assert whole == (max_tokens >= 12)
    if max_tokens > 1:
        body = tokenizer.decode(response)
        again, _ = tokenizer.response_ids({"role": "assistant", "content": body}, 100)
        assert again[: len(response)] == response


@pytest.fixture
def url() -> Iterator[str]:
    with serving(ScriptedServer(PlayBook(BOOK)).app()) as url:
        yield url


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = Request(f"{url}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def test_answers_as_vllm_does(url: str) -> None:
    asked = {"messages": ASKED, "seed": 1}
    exact = post(url, "/v1/chat/completions", {**asked, "logprobs": True, "return_token_ids": True})
    plain = post(url, "/v1/chat/completions", asked)
    choice = exact["choices"][0]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == exact["usage"]["completion_tokens"]
    assert len(exact["prompt_token_ids"]) == exact["usage"]["prompt_tokens"]
    assert "prompt_token_ids" not in plain
    assert plain["choices"][0]["message"] == choice["message"]


def test_says_that_it_is_a_double(url: str) -> None:
    with urlopen(f"{url}/v1/models") as answer:
        assert json.load(answer)["data"][0]["owned_by"] == FINGERPRINT
    assert post(url, "/v1/chat/completions", {"messages": ASKED})["system_fingerprint"] == FINGERPRINT


def test_weight_versions(url: str) -> None:
    post(url, "/update_weight_version", {"new_version": "12"})
    answer = post(url, "/v1/chat/completions", {"messages": ASKED})
    assert [span["version"] for span in answer["choices"][0]["weight_versions"]] == ["12"]


def test_max_tokens_cuts(url: str) -> None:
    answer = post(url, "/v1/chat/completions", {"messages": ASKED, "max_tokens": 3, "return_token_ids": True})
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "loo")
    assert len(choice["token_ids"]) == 3


def test_runs_as_a_program(tmp_path: Path) -> None:
    book = tmp_path / "book.jsonl"
    book.write_text(BOOK[0].model_dump_json() + "\n")
    command = [sys.executable, "-m", "workers.testing.scripted", "--book", str(book), "--seed", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            with urlopen(f"{url}/v1/models") as answer:
                assert json.load(answer)["object"] == "list"
        finally:
            process.terminate()
