from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from farm.records.trajectory import TokenIds
from workers.testing.engine.model_text import make_tokenizer
from workers.testing.engine.turn_sources import Mix, RandomTurns, ScriptTurns
from workers.testing.engine.vocabulary import Vocabulary
from workers.testing.hermes_text import loose_calls
from workers.testing.scripted_model import Branch, Script, ScriptedCall, ScriptedProblem, ScriptedTurn

WORDS = Vocabulary(make_tokenizer())
TURNS = (
    ScriptedTurn(
        content="look ü 漢字", tool_calls=(ScriptedCall(name="bash", arguments={"command": "ls"}),), reasoning="hm"
    ),
    ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments="not JSON"),)),
    ScriptedTurn(content="4"),
)
PROBLEMS = [
    ScriptedProblem(
        match="2 + 2",
        branches=(Branch(name="right", turns=TURNS), Branch(name="five", turns=(ScriptedTurn(content="5"),))),
    )
]
MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
PROMPT = WORDS.encode(WORDS.render(MESSAGES, [TOOL]))
RESULT = WORDS.encode("\n<|im_start|>user\n<tool_response>\nx\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def text_of(ids: TokenIds) -> str:
    assert ids[-1] == WORDS.end_id
    return WORDS.decode(ids, special=True).removesuffix("<|im_end|>")


def test_rollout_is_recognized_by_its_ids() -> None:
    source = ScriptTurns(WORDS, Script(PROBLEMS))
    seed = next(seed for seed in range(20) if text_of(source.turn(PROMPT, seed)) != "5")
    prompt = PROMPT
    for turn in TURNS:
        ids = source.turn(prompt, seed)
        assert text_of(ids) == turn.text
        prompt = np.concatenate([prompt, ids, RESULT])
    assert text_of(source.turn(prompt, seed)) == "done"


@pytest.mark.parametrize("seed", [None, 3])
def test_cut_turn_continues_where_it_was(seed: int | None) -> None:
    source = ScriptTurns(WORDS, Script([ScriptedProblem(match="2 + 2", branches=(Branch(name="right", turns=TURNS),))]))
    whole = source.turn(PROMPT, seed)
    for n in range(len(whole)):
        rest = source.turn(np.concatenate([PROMPT, whole[:n]]), seed)
        assert np.array_equal(np.concatenate([whole[:n], rest]), whole)


def test_turn_continues_from_another_tokenization_too() -> None:
    source = ScriptTurns(WORDS, Script([ScriptedProblem(match="2 + 2", branches=(Branch(name="right", turns=TURNS),))]))
    begun = np.array([WORDS.byte_ids[byte] for byte in TURNS[0].text.encode()[:-30]], np.int32)
    rest = source.turn(np.concatenate([PROMPT, begun]), 0)
    assert WORDS.decode(begun) + text_of(rest) == TURNS[0].text


def test_random_turns_depend_only_on_seed_and_prompt() -> None:
    one, same, other = RandomTurns(WORDS, seed=1), RandomTurns(WORDS, seed=1), RandomTurns(WORDS, seed=2)
    assert all(np.array_equal(one.turn(PROMPT, seed), same.turn(PROMPT, seed)) for seed in range(20))
    assert not np.array_equal(one.turn(PROMPT, 0), other.turn(PROMPT, 0))
    assert not np.array_equal(one.turn(PROMPT, 0), one.turn(PROMPT, 1))
    assert not np.array_equal(one.turn(PROMPT, None), one.turn(PROMPT[1:], None))


def test_random_turns_change_when_they_are_tokenized_again() -> None:
    source = RandomTurns(WORDS, seed=1)
    turns = [source.turn(PROMPT, seed) for seed in range(50)]
    same = sum(np.array_equal(WORDS.encode(WORDS.decode(ids, special=True)), ids) for ids in turns)
    assert same < 5


def test_random_turns_are_of_all_kinds() -> None:
    source = RandomTurns(WORDS, seed=1, mix=Mix(broken=0.4))
    kinds: Counter[str] = Counter()
    for seed in range(300):
        text = text_of(source.turn(PROMPT, seed))
        calls = loose_calls(text)[1]
        kinds["reasoned"] += text.startswith("<think>")
        kinds["silent"] += not calls
        for call in calls:
            kinds[call.name] += 1
            kinds["cut"] += not text.endswith("</tool_call>")
    assert set(kinds) == {"reasoned", "silent", "bash", "no_such_tool", "", "cut"}
    assert min(kinds.values()) >= 5


def test_no_tools_are_called_without_tools() -> None:
    source = RandomTurns(WORDS, seed=1)
    prompt = WORDS.encode(WORDS.render(MESSAGES, []))
    assert not any("<tool_call>" in text_of(source.turn(prompt, seed)) for seed in range(50))
