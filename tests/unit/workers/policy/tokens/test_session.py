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


class _Conversation:
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
    prompt = _Conversation(CHATML).prompt(ASK, TOOLS)
    template = CHATML.text().template
    assert (prompt.begins, prompt.continues, prompt.n_held) == ("first", None, 0)
    text = template.render(ASK, TOOLS, generation_prompt=True)
    assert prompt.ids.tolist() == CHATML.text().tokenizer.encode(text).tolist()


def test_prompt_continues_with_the_sampled_ids() -> None:
    chat = _Conversation(CHATML)
    first = chat.answer(ASK, assistant("A list."), "A list.<|im_end|>")
    prompt = chat.prompt([*ASK, assistant("A list."), user("And now?")])
    held = [*first.ids, *chat.sampled("A list.<|im_end|>")]
    assert (prompt.begins, prompt.continues, prompt.n_held) == ("", 0, len(held))
    assert prompt.ids[: prompt.n_held].tolist() == held
    assert chat.added(prompt) == "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"


def test_cut_turn_gets_its_missing_end() -> None:
    chat = _Conversation(CHATML)
    chat.answer(ASK, assistant("A li"), "A li")
    prompt = chat.prompt([*ASK, assistant("A li"), user("Go on")])
    assert chat.added(prompt).startswith("<|im_end|>\n<|im_start|>user\nGo on")


def test_turn_that_was_cut_before_its_first_token_can_be_continued() -> None:
    chat = _Conversation(CHATML)
    chat.answer(ASK, assistant(""), "")
    prompt = chat.prompt([*ASK, assistant(""), user("Go on")])
    assert prompt.continues == 0
    assert chat.added(prompt).startswith("<|im_end|>\n<|im_start|>user\nGo on")


@pytest.mark.parametrize(
    ("model", "end", "after"),
    [(CHATML, "<|endoftext|>", "\n<|im_start|>user"), (LLAMA31, "<|eom_id|>", "<|start_header_id|>user")],
    ids=["chatml", "llama31"],
)
def test_another_end_token_is_kept_and_no_second_one_is_added(model: Model, end: str, after: str) -> None:
    chat = _Conversation(model)
    prompt = chat.prompt(ASK)
    ids = np.concatenate([chat.sampled("Yes"), [chat.tokenizer.id_of(end)]])
    chat.session.commit(prompt, token_ids(ids), assistant("Yes"))
    following = chat.prompt([*ASK, assistant("Yes"), user("And?")])
    assert following.continues == 0
    assert chat.added(following).startswith(after)


def test_end_token_that_history_writes_differently_is_kept() -> None:
    chat = _Conversation(HARMONY)
    chat.answer(ASK, assistant("Yes"), "<|channel|>final<|message|>Yes<|return|>")
    prompt = chat.prompt([*ASK, assistant("Yes"), user("And?")])
    assert prompt.continues == 0
    assert chat.added(prompt) == "<|start|>user<|message|>And?<|end|><|start|>assistant"


@pytest.mark.parametrize("sampled", ["", "<|observation|>", "<|endoftext|>", "<|user|>"])
def test_end_token_that_is_the_next_header_replaces_no_other_header(sampled: str) -> None:
    chat = _Conversation(GLM)
    prompt = chat.prompt(ASK)
    chat.session.commit(prompt, chat.tokenizer.encode("Yes" + sampled), assistant("Yes"))
    following = chat.prompt([*ASK, assistant("Yes"), user("And?")])
    assert following.continues == 0
    expected = "\nAnd?<|assistant|>\n"
    assert chat.added(following) == (expected if sampled == "<|user|>" else f"<|user|>{expected}")


def test_template_with_textual_arguments_gets_them_as_sampled() -> None:
    chat = _Conversation(DEEPSEEK_V31)
    turn = assistant("", [call("call_0001", '{"query":  "x"}')])
    template = DEEPSEEK_V31.text().template
    rendered_text = template.render([*ASK, turn], (), generation_prompt=False).rpartition("</think>")[2]
    first = chat.answer(ASK, turn, rendered_text)
    prompt = chat.prompt([*ASK, turn, tool("call_0001", "files")])
    assert (prompt.begins, prompt.continues) == ("", 0)
    assert '{"query":  "x"}' in chat.tokenizer.decode(prompt.ids[len(first.ids) : prompt.n_held])
    assert chat.tokenizer.decode(prompt.ids) == template.render(
        [*ASK, turn, tool("call_0001", "files")], (), generation_prompt=True
    )


@pytest.mark.parametrize("sampled", ["Yes", "Yes\n\n###", "Yes\n\n### User:\n"])
def test_end_of_turn_made_of_text_is_completed(sampled: str) -> None:
    chat = _Conversation(PLAIN)
    first = chat.answer(ASK, assistant("Yes"), sampled)
    prompt = chat.prompt([*ASK, assistant("Yes"), user("And?")])
    assert prompt.ids[: len(first.ids)].tolist() == first.ids.tolist()
    rendered_text = chat.tokenizer.decode(prompt.ids[len(first.ids) :])
    assert rendered_text == "Yes\n\n### User:\nAnd?\n\n### Assistant:\n"


def test_text_that_ends_like_the_beginning_of_the_end_of_turn_is_kept() -> None:
    chat = _Conversation(PLAIN)
    chat.answer(ASK, assistant("Yes\n"), "Yes\n")
    assert chat.added(chat.prompt([*ASK, assistant("Yes\n"), user("And?")])).startswith("\n\n### User")


def test_call_in_a_turn_that_ends_by_text_is_not_repeated() -> None:
    chat = _Conversation(PLAIN)
    text = '\n```call\n{"name": "search", "arguments": {"query": "x"}}\n```'
    chat.answer(ASK, CALLED, text, TOOLS)
    prompt = chat.prompt([*ASK, CALLED, tool("call_0001", "files")], TOOLS)
    assert chat.added(prompt) == "\n\n### Result:\nfiles\n\n### Assistant:\n"


def test_tool_results_of_one_turn_are_merged_like_the_template() -> None:
    chat = _Conversation(CHATML)
    turn = assistant("", [call("call_0001"), call("call_0002")])
    chat.answer(ASK, turn, "calls<|im_end|>", TOOLS)
    prompt = chat.prompt([*ASK, turn, tool("call_0001", "one"), tool("call_0002", "two")], TOOLS)
    assert chat.added(prompt) == (
        "\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_all_branches_are_held() -> None:
    chat = _Conversation(CHATML)
    chat.answer(ASK, assistant("One"), "One<|im_end|>")
    chat.answer(ASK, assistant("Two"), "Two<|im_end|>")
    other = [user("Another thing")]
    chat.answer(other, assistant("Three"), "Three<|im_end|>")
    assert chat.prompt([*ASK, assistant("One"), user("?")]).continues == 0
    assert chat.prompt([*ASK, assistant("Two"), user("?")]).continues == 1
    assert chat.prompt([*other, assistant("Three"), user("?")]).continues == 2


def test_equivalent_turns_are_distinguished_by_their_replies() -> None:
    chat = _Conversation(CHATML)
    turn = assistant("Yes")
    chat.answer(ASK, turn, "Yes<|im_end|>")
    chat.answer([*ASK, turn, user("And?")], assistant("So."), "So.<|im_end|>")
    chat.answer(ASK, dict(turn), "Yes<|endoftext|>")
    assert chat.prompt([*ASK, assistant("Yes"), user("And?"), assistant("So."), user("?")]).continues == 1
    assert chat.prompt([*ASK, assistant("Yes"), user("Another")]).continues == 2


def test_earlier_call_can_be_forked() -> None:
    chat = _Conversation(CHATML)
    one, two = assistant("One"), assistant("Two")
    chat.answer(ASK, one, "One<|im_end|>")
    chat.answer([*ASK, one, user("a")], two, "Two<|im_end|>")
    prompt = chat.prompt([*ASK, one, user("b")])
    assert (prompt.begins, prompt.continues) == ("", 0)
    assert chat.added(prompt).startswith("\n<|im_start|>user\nb")


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
    chat = _Conversation(CHATML)
    chat.answer(ASK, CALLED, "call<|im_end|>", TOOLS)
    prompt = chat.prompt(messages, tools)
    text = CHATML.text().template.render(messages, tools, generation_prompt=True)
    assert prompt.continues is None
    assert prompt.n_held == 0
    assert prompt.ids.tolist() == chat.tokenizer.encode(text).tolist()
    with pytest.raises(AssertionError, match=f"branch: {why}"):
        raise AssertionError(prompt.begins)


def test_messages_echoed_in_any_client_form_continue() -> None:
    chat = _Conversation(QWEN3)
    held = assistant("", [call("call_0001", '{"query": "x", "n": 1}')], reasoning="Let me look.")
    chat.answer(ASK, held, "<think>\nLet me look.\n</think>\n\ncall<|im_end|>", TOOLS)
    echo: Message = {
        "tool_calls": [
            {"function": {"arguments": '{"n":1,"query":"x"}', "name": "search"}, "id": "abc", "type": "function"}
        ],
        "provider_specific_fields": {"refusal": None},
        "content": None,
        "role": "assistant",
    }
    listed: Message = {"role": "user", "content": [{"type": "text", "text": "What is there?"}]}
    prompt = chat.prompt([ASK[0], listed, echo, tool("abc", "files")], TOOLS)
    assert prompt.continues == 0
    turn = chat.answer([ASK[0], listed, echo, tool("abc", "files")], assistant("Files."), "Files.<|im_end|>", TOOLS)
    assert turn.ids.tolist() == prompt.ids.tolist()


def test_new_result_uses_the_held_call_id() -> None:
    chat = _Conversation(MISTRAL_V7)
    chat.answer(ASK, assistant("", [call("aaaaaaaa1")]), "[TOOL_CALLS]x</s>", TOOLS)
    echo = assistant(None, [call("bbbbbbbb2")])
    for _ in range(2):
        prompt = chat.prompt([*ASK, dict(echo), tool("bbbbbbbb2", "files")], TOOLS)
        assert chat.added(prompt) == "[TOOL_RESULTS]aaaaaaaa1[TOOL_CONTENT]files[/TOOL_RESULTS]"


def test_agent_that_rewrites_its_calls_begins_a_new_row_every_turn() -> None:
    chat = _Conversation(CHATML)
    messages = list(ASK)
    for turn in range(4):
        prompt = chat.answer(messages, assistant("", [call(f"call_{turn}")]), "call<|im_end|>", TOOLS)
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
    chat = _Conversation(model)
    chat.answer(ASK, turn, f"sampled{model.eos}", tools)
    prompt = chat.prompt([*ASK, turn, new], tools)
    assert prompt.begins.startswith(f"rewritten: {what}")
    assert prompt.continues is None
    text = model.text().template.render([*ASK, turn, new], tools, generation_prompt=True)
    assert prompt.ids.tolist() == chat.tokenizer.encode(text).tolist()


def test_reasoning_before_the_last_user_message_is_missed_at_any_distance() -> None:
    chat = _Conversation(QWEN3)
    messages: list[Message] = list(ASK)
    for number in range(12):
        turn = assistant("", [call(f"call_{number}")], reasoning="hm" if number == 3 else "")
        thought = "<think>\nhm\n</think>\n\n" if number == 3 else ""
        prompt = chat.answer(messages, turn, f"{thought}call<|im_end|>", TOOLS)
        assert prompt.begins == ("first" if number == 0 else "")
        messages += [turn, tool(f"call_{number}", f"files {number}")]
    chat.answer(messages, assistant("Done."), "Done.<|im_end|>", TOOLS)
    prompt = chat.prompt([*messages, assistant("Done."), user("Thanks")], TOOLS)
    assert prompt.begins == "rewritten: earlier messages are rendered again"


def test_reasoning_since_the_last_user_message_is_missed_after_many_rounds() -> None:
    chat = _Conversation(QWEN3)
    messages: list[Message] = list(ASK)
    for number in range(10):
        called = number % 4 != 3
        thought = "hm" if called and number < 9 else ""
        turn = assistant("" if called else "Done.", [call(f"call_{number}")] if called else [], thought)
        chat.answer(messages, turn, f"sampled {number}<|im_end|>", TOOLS)
        messages += [turn, tool(f"call_{number}", "files") if called else user("Next")]
    chat.answer(messages, assistant("Done."), "Done.<|im_end|>", TOOLS)
    prompt = chat.prompt([*messages, assistant("Done."), user("Thanks")], TOOLS)
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
    chat = _Conversation(QWEN3, template_kwargs={"enable_thinking": False})
    first = chat.answer(ASK, assistant("Yes"), "Yes<|im_end|>")
    assert chat.tokenizer.decode(first.ids).endswith("<think>\n\n</think>\n\n")
    prompt = chat.prompt([*ASK, assistant("Yes"), user("And?")])
    assert prompt.begins == "rewritten: the generation prompt is not kept in the turn's history"


@pytest.mark.parametrize("model", [QWEN3, DEEPSEEK_R1, MISTRAL_V7, HARMONY], ids=lambda model: model.name)
def test_rewritten_turns_can_be_kept(model: Model) -> None:
    chat = _Conversation(model, keep_rewritten=True)
    turn = assistant("Yes", reasoning="hm" if model.thinks else "")
    first = chat.answer(ASK, turn, f"hm Yes{model.eos}", TOOLS)
    prompt = chat.prompt([*ASK, turn, user("And?")], TOOLS)
    assert (prompt.begins, prompt.continues) == ("", 0)
    assert prompt.ids[: prompt.n_held].tolist() == [*first.ids, *chat.sampled(f"hm Yes{model.eos}")]
    text = model.text().template.render([*ASK, turn, user("And?")], TOOLS, generation_prompt=True)
    assert text.endswith(chat.added(prompt))
    assert "And?" in chat.added(prompt)
    assert "Yes" not in chat.added(prompt)


def test_rewrites_that_cannot_be_kept_begin_a_new_row_even_so() -> None:
    chat = _Conversation(DEEPSEEK_R1, keep_rewritten=True)
    turn = assistant("", reasoning="hm")
    chat.answer(ASK, turn, "hm", TOOLS)
    assert chat.prompt([*ASK, turn, user("And?")], TOOLS).begins.startswith("rewritten: the generation prompt")


def test_template_that_counts_rounds_is_counted_correctly() -> None:
    chat = _Conversation(ROUNDS)
    messages: list[Message] = [user("Ask 0")]
    for number in range(9):
        turn = assistant(f"Yes {number}")
        chat.answer(messages, turn, f"Yes {number}</s>")
        messages += [turn, user(f"Ask {number + 1}")]
        prompt = chat.prompt(messages)
        assert prompt.begins == ""
        assert chat.added(prompt).startswith(f"[Round {number + 2}]")


def test_refused_conversation_is_an_error_and_does_not_affect_the_session() -> None:
    chat = _Conversation(GEMMA)
    chat.answer(ASK, assistant("Yes"), "Yes<end_of_turn>")
    with pytest.raises(TemplateError, match="must alternate"):
        chat.prompt([*ASK, assistant("Yes"), user("a"), user("b")])
    assert chat.prompt([*ASK, assistant("Yes"), user("a")]).continues == 0


def test_conversation_keeps_its_date() -> None:
    chat = _Conversation(HARMONY)
    first = chat.tokenizer.decode(chat.prompt(ASK).ids)
    chat.answer(ASK, assistant("Yes"), "<|channel|>final<|message|>Yes<|return|>")
    again = chat.tokenizer.decode(chat.prompt([user("Else")]).ids)
    assert first.split("<|end|>")[0] == again.split("<|end|>")[0]


def test_bos_token_is_only_at_the_very_beginning() -> None:
    chat = _Conversation(MISTRAL_V7)
    bos = chat.tokenizer.id_of("<s>")
    chat.answer(ASK, assistant("Yes"), "Yes</s>")
    prompt = chat.prompt([*ASK, assistant("Yes"), user("And?")])
    assert prompt.continues == 0
    assert np.flatnonzero(prompt.ids == bos).tolist() == [0]


def test_held_ids_are_stored_once() -> None:
    chat = _Conversation(CHATML)
    messages: list[Message] = list(ASK)
    for number in range(20):
        turn = assistant("word " * 50 + str(number))
        prompt = chat.answer(messages, turn, "word " * 50 + "<|im_end|>")
        messages += [turn, user("And?")]
    assert prompt.held is not None
    held = prompt.held.pieces()
    assert all(piece.base is None for piece in held)
    assert sum(map(len, held)) == prompt.n_held
