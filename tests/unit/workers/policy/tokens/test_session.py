"""Sampled ids are kept; the text after them is the template's; a session that cannot continue refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tokenizers

from farm.records.trajectory import Message, TokenIds, token_ids
from tests.unit.workers.policy.tokens.zoo import (
    CHATML,
    DEEPSEEK_R1,
    DEEPSEEK_V31,
    GEMMA,
    GLM,
    HARMONY,
    LLAMA31,
    MISTRAL_V7,
    PLAIN,
    QWEN3,
    ROUNDS,
    SEARCH,
    Model,
    assistant,
    call,
    system,
    tool,
    trained,
    user,
)
from workers.policy.tokens.session import Prompt, TokenSession
from workers.policy.tokens.template import TemplateError
from workers.policy.tokens.tokenizer import ModelText, Tokenizer

ASK = [system("Be kind."), user("What is there?")]
CALLED = assistant("", [call("call_0001")])
TOOLS = [SEARCH]


class Play:
    """A session and its conversation as text."""

    def __init__(self, model: Model, **options: Any) -> None:
        self.model = model
        self.session = TokenSession(model.text(), **options)
        self.tokenizer = model.text().tokenizer

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Prompt:
        return self.session.prompt(messages, tools)

    def sampled(self, text: str) -> TokenIds:
        """Return each letter as a separate token: no tokenizer would encode it so."""
        body, end = (
            (text[: -len(self.model.eos)], self.model.eos) if text.endswith(self.model.eos or "\0") else (text, "")
        )
        pieces = [self.tokenizer.encode_within(letter) for letter in body] + [self.tokenizer.encode(end)]
        return np.concatenate(pieces)

    def answer(self, messages: Sequence[Message], message: Message, text: str, tools: Sequence[Any] = ()) -> Prompt:
        """Request a prompt, and hold `message` as sampled in the tokens of `text`."""
        prompt = self.prompt(messages, tools)
        self.session.commit(prompt, self.sampled(text), message)
        return prompt

    def added(self, prompt: Prompt) -> str:
        return self.tokenizer.decode(prompt.ids[prompt.n_held :])


def test_first_prompt_is_the_whole_conversation() -> None:
    prompt = Play(CHATML).prompt(ASK, TOOLS)
    template = CHATML.text().template
    assert (prompt.begins, prompt.continues, prompt.n_held) == ("first", None, 0)
    text = template.render(ASK, TOOLS, generation_prompt=True)
    assert prompt.ids.tolist() == CHATML.text().tokenizer.encode(text).tolist()


def test_prompt_continues_with_the_sampled_ids() -> None:
    play = Play(CHATML)
    first = play.answer(ASK, assistant("A list."), "A list.<|im_end|>")
    prompt = play.prompt([*ASK, assistant("A list."), user("And now?")])
    held = [*first.ids, *play.sampled("A list.<|im_end|>")]
    assert (prompt.begins, prompt.continues, prompt.n_held) == ("", 0, len(held))
    assert prompt.ids[: prompt.n_held].tolist() == held
    assert play.added(prompt) == "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"


def test_cut_turn_gets_its_missing_end() -> None:
    play = Play(CHATML)
    play.answer(ASK, assistant("A li"), "A li")
    prompt = play.prompt([*ASK, assistant("A li"), user("Go on")])
    assert play.added(prompt).startswith("<|im_end|>\n<|im_start|>user\nGo on")


def test_turn_that_was_cut_before_its_first_token_can_be_continued() -> None:
    play = Play(CHATML)
    play.answer(ASK, assistant(""), "")
    prompt = play.prompt([*ASK, assistant(""), user("Go on")])
    assert prompt.continues == 0
    assert play.added(prompt).startswith("<|im_end|>\n<|im_start|>user\nGo on")


@pytest.mark.parametrize(
    ("model", "end", "after"),
    [(CHATML, "<|endoftext|>", "\n<|im_start|>user"), (LLAMA31, "<|eom_id|>", "<|start_header_id|>user")],
    ids=["chatml", "llama31"],
)
def test_another_end_token_is_kept_and_no_second_one_is_added(model: Model, end: str, after: str) -> None:
    play = Play(model)
    prompt = play.prompt(ASK)
    ids = np.concatenate([play.sampled("Yes"), [play.tokenizer.id_of(end)]])
    play.session.commit(prompt, token_ids(ids), assistant("Yes"))
    following = play.prompt([*ASK, assistant("Yes"), user("And?")])
    assert following.continues == 0
    assert play.added(following).startswith(after)


def test_end_token_that_history_writes_differently_is_kept() -> None:
    play = Play(HARMONY)
    play.answer(ASK, assistant("Yes"), "<|channel|>final<|message|>Yes<|return|>")
    prompt = play.prompt([*ASK, assistant("Yes"), user("And?")])
    assert prompt.continues == 0
    assert play.added(prompt) == "<|start|>user<|message|>And?<|end|><|start|>assistant"


@pytest.mark.parametrize("sampled", ["", "<|observation|>", "<|endoftext|>", "<|user|>"])
def test_end_token_that_is_the_next_header_replaces_no_other_header(sampled: str) -> None:
    play = Play(GLM)
    prompt = play.prompt(ASK)
    play.session.commit(prompt, play.tokenizer.encode("Yes" + sampled), assistant("Yes"))
    following = play.prompt([*ASK, assistant("Yes"), user("And?")])
    assert following.continues == 0
    expected = "\nAnd?<|assistant|>\n"
    assert play.added(following) == (expected if sampled == "<|user|>" else f"<|user|>{expected}")


def test_template_with_textual_arguments_gets_them_as_sampled() -> None:
    play = Play(DEEPSEEK_V31)
    turn = assistant("", [call("call_0001", '{"query":  "x"}')])
    template = DEEPSEEK_V31.text().template
    said = template.render([*ASK, turn], (), generation_prompt=False).rpartition("</think>")[2]
    first = play.answer(ASK, turn, said)
    prompt = play.prompt([*ASK, turn, tool("call_0001", "files")])
    assert (prompt.begins, prompt.continues) == ("", 0)
    assert '{"query":  "x"}' in play.tokenizer.decode(prompt.ids[len(first.ids) : prompt.n_held])
    assert play.tokenizer.decode(prompt.ids) == template.render(
        [*ASK, turn, tool("call_0001", "files")], (), generation_prompt=True
    )


@pytest.mark.parametrize("sampled", ["Yes", "Yes\n\n###", "Yes\n\n### User:\n"])
def test_end_of_turn_made_of_text_is_completed(sampled: str) -> None:
    play = Play(PLAIN)
    first = play.answer(ASK, assistant("Yes"), sampled)
    prompt = play.prompt([*ASK, assistant("Yes"), user("And?")])
    assert prompt.ids[: len(first.ids)].tolist() == first.ids.tolist()
    said = play.tokenizer.decode(prompt.ids[len(first.ids) :])
    assert said == "Yes\n\n### User:\nAnd?\n\n### Assistant:\n"


def test_text_that_ends_like_the_beginning_of_the_end_of_turn_is_kept() -> None:
    play = Play(PLAIN)
    play.answer(ASK, assistant("Yes\n"), "Yes\n")
    assert play.added(play.prompt([*ASK, assistant("Yes\n"), user("And?")])).startswith("\n\n### User")


def test_call_in_a_turn_that_ends_by_text_is_not_repeated() -> None:
    play = Play(PLAIN)
    text = '\n```call\n{"name": "search", "arguments": {"query": "x"}}\n```'
    play.answer(ASK, CALLED, text, TOOLS)
    prompt = play.prompt([*ASK, CALLED, tool("call_0001", "files")], TOOLS)
    assert play.added(prompt) == "\n\n### Result:\nfiles\n\n### Assistant:\n"


def test_tool_results_of_one_turn_are_merged_like_the_template() -> None:
    play = Play(CHATML)
    turn = assistant("", [call("call_0001"), call("call_0002")])
    play.answer(ASK, turn, "calls<|im_end|>", TOOLS)
    prompt = play.prompt([*ASK, turn, tool("call_0001", "one"), tool("call_0002", "two")], TOOLS)
    assert play.added(prompt) == (
        "\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_all_branches_are_held() -> None:
    play = Play(CHATML)
    play.answer(ASK, assistant("One"), "One<|im_end|>")
    play.answer(ASK, assistant("Two"), "Two<|im_end|>")
    other = [user("Another thing")]
    play.answer(other, assistant("Three"), "Three<|im_end|>")
    assert play.prompt([*ASK, assistant("One"), user("?")]).continues == 0
    assert play.prompt([*ASK, assistant("Two"), user("?")]).continues == 1
    assert play.prompt([*other, assistant("Three"), user("?")]).continues == 2


def test_equivalent_turns_are_distinguished_by_their_replies() -> None:
    play = Play(CHATML)
    turn = assistant("Yes")
    play.answer(ASK, turn, "Yes<|im_end|>")
    play.answer([*ASK, turn, user("And?")], assistant("So."), "So.<|im_end|>")
    play.answer(ASK, dict(turn), "Yes<|endoftext|>")
    assert play.prompt([*ASK, assistant("Yes"), user("And?"), assistant("So."), user("?")]).continues == 1
    assert play.prompt([*ASK, assistant("Yes"), user("Another")]).continues == 2


def test_earlier_call_can_be_forked() -> None:
    play = Play(CHATML)
    one, two = assistant("One"), assistant("Two")
    play.answer(ASK, one, "One<|im_end|>")
    play.answer([*ASK, one, user("a")], two, "Two<|im_end|>")
    prompt = play.prompt([*ASK, one, user("b")])
    assert (prompt.begins, prompt.continues) == ("", 0)
    assert play.added(prompt).startswith("\n<|im_start|>user\nb")


@pytest.mark.parametrize(
    ("messages", "tools", "why"),
    [
        ([user("Summary of all so far"), user("go on")], TOOLS, "another conversation"),
        ([*ASK, assistant("edited"), user("go on")], TOOLS, r"message 2 \(assistant\)"),
        ([ASK[0], user("edited"), CALLED, tool("call_0001", "x")], TOOLS, r"message 1 \(user\)"),
        ([*ASK, CALLED, tool("call_0001", "x")], [], "no earlier call had these tools"),
        ([*ASK, CALLED, tool("call_0001", "x"), assistant("I be")], TOOLS, "the last message is the assistant's"),
        (ASK, TOOLS, "the same was asked before"),
    ],
)
def test_prompt_that_continues_no_call_is_a_branch(messages: list[Message], tools: list[Any], why: str) -> None:
    play = Play(CHATML)
    play.answer(ASK, CALLED, "call<|im_end|>", TOOLS)
    prompt = play.prompt(messages, tools)
    text = CHATML.text().template.render(messages, tools, generation_prompt=True)
    assert prompt.continues is None
    assert prompt.n_held == 0
    assert prompt.ids.tolist() == play.tokenizer.encode(text).tolist()
    with pytest.raises(AssertionError, match=f"branch: {why}"):
        raise AssertionError(prompt.begins)


def test_messages_echoed_in_any_client_form_continue() -> None:
    play = Play(QWEN3)
    held = assistant("", [call("call_0001", '{"query": "x", "n": 1}')], reasoning="Let me look.")
    play.answer(ASK, held, "<think>\nLet me look.\n</think>\n\ncall<|im_end|>", TOOLS)
    echo: Message = {
        "tool_calls": [
            {"function": {"arguments": '{"n":1,"query":"x"}', "name": "search"}, "id": "abc", "type": "function"}
        ],
        "provider_specific_fields": {"refusal": None},
        "content": None,
        "role": "assistant",
    }
    listed: Message = {"role": "user", "content": [{"type": "text", "text": "What is there?"}]}
    prompt = play.prompt([ASK[0], listed, echo, tool("abc", "files")], TOOLS)
    assert prompt.continues == 0
    turn = play.answer([ASK[0], listed, echo, tool("abc", "files")], assistant("Files."), "Files.<|im_end|>", TOOLS)
    assert turn.ids.tolist() == prompt.ids.tolist()


def test_new_result_uses_the_held_call_id() -> None:
    play = Play(MISTRAL_V7)
    play.answer(ASK, assistant("", [call("aaaaaaaa1")]), "[TOOL_CALLS]x</s>", TOOLS)
    echo = assistant(None, [call("bbbbbbbb2")])
    for _ in range(2):
        prompt = play.prompt([*ASK, dict(echo), tool("bbbbbbbb2", "files")], TOOLS)
        assert play.added(prompt) == "[TOOL_RESULTS]aaaaaaaa1[TOOL_CONTENT]files[/TOOL_RESULTS]"


def test_agent_that_rewrites_its_calls_begins_a_new_row_every_turn() -> None:
    play = Play(CHATML)
    messages = list(ASK)
    for turn in range(4):
        prompt = play.answer(messages, assistant("", [call(f"call_{turn}")]), "call<|im_end|>", TOOLS)
        assert prompt.continues is None
        assert prompt.begins == "first" if turn == 0 else prompt.begins.startswith("branch: message")
        messages = [*messages, assistant('Calling tools:\n[{"name": "search"}]'), user(f"Observation:\n{turn}")]


@pytest.mark.parametrize(
    ("model", "turn", "new", "tools", "what"),
    [
        (QWEN3, assistant("Yes", reasoning="hm"), user("And?"), [], "the reasoning is dropped"),
        (QWEN3, assistant("<think>\nhm\n</think>\n\nYes"), user("And?"), [], "the reasoning in the text is dropped"),
        (DEEPSEEK_R1, assistant("Yes", reasoning="hm"), user("And?"), [], "the generation prompt is not kept"),
        (MISTRAL_V7, assistant("Yes"), user("And?"), TOOLS, "earlier messages are rendered again"),
        (HARMONY, assistant("Yes", reasoning="hm"), user("And?"), [], "the reasoning is dropped"),
        (LLAMA31, assistant("Look:", [call("1")]), tool("1", "x"), TOOLS, "the text is dropped"),
        (GEMMA, assistant("Look:", [call("1")]), user("x"), TOOLS, "tool call 1 is dropped"),
        (CHATML, assistant("Yes", reasoning="hm"), user("And?"), [], "the reasoning is dropped"),
    ],
)
def test_template_that_rewrites_a_turn_begins_a_new_row_with_a_reason(
    model: Model, turn: Message, new: Message, tools: list[Any], what: str
) -> None:
    play = Play(model)
    play.answer(ASK, turn, f"sampled{model.eos}", tools)
    prompt = play.prompt([*ASK, turn, new], tools)
    assert prompt.begins.startswith(f"rewritten: {what}")
    assert prompt.continues is None
    text = model.text().template.render([*ASK, turn, new], tools, generation_prompt=True)
    assert prompt.ids.tolist() == play.tokenizer.encode(text).tolist()


def test_reasoning_before_the_last_user_message_is_missed_at_any_distance() -> None:
    play = Play(QWEN3)
    messages: list[Message] = list(ASK)
    for number in range(12):
        turn = assistant("", [call(f"call_{number}")], reasoning="hm" if number == 3 else "")
        thought = "<think>\nhm\n</think>\n\n" if number == 3 else ""
        prompt = play.answer(messages, turn, f"{thought}call<|im_end|>", TOOLS)
        assert prompt.begins == ("first" if number == 0 else "")
        messages += [turn, tool(f"call_{number}", f"files {number}")]
    play.answer(messages, assistant("Done."), "Done.<|im_end|>", TOOLS)
    prompt = play.prompt([*messages, assistant("Done."), user("Thanks")], TOOLS)
    assert prompt.begins == "rewritten: earlier messages are rendered again"


def test_reasoning_since_the_last_user_message_is_missed_after_many_rounds() -> None:
    play = Play(QWEN3)
    messages: list[Message] = list(ASK)
    for number in range(10):
        called = number % 4 != 3
        thought = "hm" if called and number < 9 else ""
        turn = assistant("" if called else "Done.", [call(f"call_{number}")] if called else [], thought)
        play.answer(messages, turn, f"sampled {number}<|im_end|>", TOOLS)
        messages += [turn, tool(f"call_{number}", "files") if called else user("Next")]
    play.answer(messages, assistant("Done."), "Done.<|im_end|>", TOOLS)
    prompt = play.prompt([*messages, assistant("Done."), user("Thanks")], TOOLS)
    assert prompt.begins == "rewritten: earlier messages are rendered again"


@pytest.mark.parametrize("ended", [True, False])
def test_end_token_that_text_cannot_write_is_added_as_a_token(ended: bool) -> None:
    content = json.loads(trained(ROUNDS.specials).to_str())
    content["added_tokens"] = []
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)), [0])
    session = TokenSession(ModelText(tokenizer, ROUNDS.text().template, "plain end"))
    assert len(tokenizer.encode("</s>")) > 1
    prompt = session.prompt([user("a")], ())
    session.commit(prompt, token_ids([*tokenizer.encode("b"), *([0] if ended else [])]), assistant("b"))
    following = session.prompt([user("a"), assistant("b"), user("c")], ())
    expected = [*([] if ended else [0]), *tokenizer.encode("[Round 2]\n\nAsk: c\n\nAnswer:")]
    assert following.ids[following.n_held :].tolist() == expected


def test_empty_thought_in_the_generation_prompt_is_a_rewrite() -> None:
    play = Play(QWEN3, template_kwargs={"enable_thinking": False})
    first = play.answer(ASK, assistant("Yes"), "Yes<|im_end|>")
    assert play.tokenizer.decode(first.ids).endswith("<think>\n\n</think>\n\n")
    prompt = play.prompt([*ASK, assistant("Yes"), user("And?")])
    assert prompt.begins == "rewritten: the generation prompt is not kept in the turn's history"


@pytest.mark.parametrize("model", [QWEN3, DEEPSEEK_R1, MISTRAL_V7, HARMONY], ids=lambda model: model.name)
def test_rewritten_turns_can_be_kept(model: Model) -> None:
    play = Play(model, keep_rewritten=True)
    turn = assistant("Yes", reasoning="hm" if model.thinks else "")
    first = play.answer(ASK, turn, f"hm Yes{model.eos}", TOOLS)
    prompt = play.prompt([*ASK, turn, user("And?")], TOOLS)
    assert (prompt.begins, prompt.continues) == ("", 0)
    assert prompt.ids[: prompt.n_held].tolist() == [*first.ids, *play.sampled(f"hm Yes{model.eos}")]
    text = model.text().template.render([*ASK, turn, user("And?")], TOOLS, generation_prompt=True)
    assert text.endswith(play.added(prompt))
    assert "And?" in play.added(prompt)
    assert "Yes" not in play.added(prompt)


def test_rewrites_that_cannot_be_kept_begin_a_new_row_even_so() -> None:
    play = Play(DEEPSEEK_R1, keep_rewritten=True)
    turn = assistant("", reasoning="hm")
    play.answer(ASK, turn, "hm", TOOLS)
    assert play.prompt([*ASK, turn, user("And?")], TOOLS).begins.startswith("rewritten: the generation prompt")


def test_template_that_counts_rounds_is_counted_correctly() -> None:
    play = Play(ROUNDS)
    messages: list[Message] = [user("Ask 0")]
    for number in range(9):
        turn = assistant(f"Yes {number}")
        play.answer(messages, turn, f"Yes {number}</s>")
        messages += [turn, user(f"Ask {number + 1}")]
        prompt = play.prompt(messages)
        assert prompt.begins == ""
        assert play.added(prompt).startswith(f"[Round {number + 2}]")


def test_refused_conversation_is_an_error_and_does_not_affect_the_session() -> None:
    play = Play(GEMMA)
    play.answer(ASK, assistant("Yes"), "Yes<end_of_turn>")
    with pytest.raises(TemplateError, match="must alternate"):
        play.prompt([*ASK, assistant("Yes"), user("a"), user("b")])
    assert play.prompt([*ASK, assistant("Yes"), user("a")]).continues == 0


def test_conversation_keeps_its_date() -> None:
    play = Play(HARMONY)
    first = play.tokenizer.decode(play.prompt(ASK).ids)
    play.answer(ASK, assistant("Yes"), "<|channel|>final<|message|>Yes<|return|>")
    again = play.tokenizer.decode(play.prompt([user("Else")]).ids)
    assert first.split("<|end|>")[0] == again.split("<|end|>")[0]


def test_bos_token_is_only_at_the_very_beginning() -> None:
    play = Play(MISTRAL_V7)
    bos = play.tokenizer.id_of("<s>")
    play.answer(ASK, assistant("Yes"), "Yes</s>")
    prompt = play.prompt([*ASK, assistant("Yes"), user("And?")])
    assert prompt.continues == 0
    assert np.flatnonzero(prompt.ids == bos).tolist() == [0]


def test_held_ids_are_stored_once() -> None:
    play = Play(CHATML)
    messages: list[Message] = list(ASK)
    for number in range(20):
        turn = assistant("word " * 50 + str(number))
        prompt = play.answer(messages, turn, "word " * 50 + "<|im_end|>")
        messages += [turn, user("And?")]
    assert prompt.held is not None
    held = prompt.held.pieces()
    assert all(piece.base is None for piece in held)
    assert sum(map(len, held)) == prompt.n_held
