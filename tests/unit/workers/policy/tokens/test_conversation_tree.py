"""Random conversations of every model of the zoo: prompts begin with the held ids, and end like the template's text.

The oracle is the template itself, rendered completely each time; the code under test does so only for a new segment.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farm.records.trajectory import Message, TokenIds
from tests.unit.workers.policy.tokens.zoo import (
    ALL,
    GEMMA,
    GLM,
    HARMONY,
    MISTRAL_V7,
    PLAIN,
    ROUNDS,
    SEARCH,
    Model,
    assistant,
    call,
    system,
    tool,
    user,
)
from workers.policy.tokens.session import Prompt, TokenSession

STRICT_ROLES = (MISTRAL_V7, GEMMA, ROUNDS)
TEXTS = st.one_of(
    st.text(alphabet="ab é漢🎉\n{}\"'<>&/", max_size=30),
    st.text(alphabet="ab é\n", min_size=10, max_size=40).map(lambda text: text * 5),
)


def fixed_date(_: str) -> str:
    return "21 Nov 2026"


VARIABLES = {"strftime_now": fixed_date}


@dataclass
class _Step:
    """One turn of a script: its text, how it is sampled, and the reply of the client."""

    turn: Message
    new: list[Message]
    cut: bool
    odd: bool


@dataclass
class RecordedConversation:
    """A conversation as it ran: before each call, its prompt and the sampled tokens."""

    messages: list[list[Message]] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    responses: list[TokenIds] = field(default_factory=list)


@st.composite
def scripts(draw: st.DrawFn, model: Model) -> tuple[list[Message], list[_Step]]:
    opening = [user(f"asked first {draw(TEXTS)}".strip())]
    if model is not ROUNDS and draw(st.booleans()):
        opening.insert(0, system(f"system {draw(TEXTS)}"))
    return opening, [draw(steps(model, number)) for number in range(draw(st.integers(1, 7)))]


@st.composite
def steps(draw: st.DrawFn, model: Model, number: int) -> _Step:
    thought = f"thought{number} {draw(TEXTS)}".strip() if model.thinks and draw(st.booleans()) else ""
    called = model.tools and draw(st.booleans())
    text = "" if called and not (model.tool_text and draw(st.booleans())) else f"said{number} {draw(TEXTS)}".strip()
    calls = [
        call(f"call{number}000{n}", _arguments(draw, number)) for n in range(_n_calls(draw, model) if called else 0)
    ]
    new = [tool(each["id"], f"result {draw(TEXTS)}".strip()) for each in calls]
    if not called or (model not in STRICT_ROLES and draw(st.booleans())):
        new.append(user(f"asked {draw(TEXTS)}".strip()))
    return _Step(assistant(text, calls, thought), new, draw(st.booleans()), draw(st.booleans()))


def _n_calls(draw: st.DrawFn, model: Model) -> int:
    return draw(st.integers(1, 2)) if model.parallel else 1


def _arguments(draw: st.DrawFn, number: int) -> str:
    return draw(st.sampled_from([f'{{"query": "ask{number}"}}', f'{{"n": [1, 2], "query": "ask{number}", "é": null}}']))


@st.composite
def echoes(draw: st.DrawFn, message: Message) -> Message:
    """Return the message as some client sends it back."""
    result = dict(message)
    if draw(st.booleans()):
        result = dict(reversed(result.items())) | {"provider_specific_fields": None}
    if draw(st.booleans()):
        result.pop("reasoning_content", None)
    if not result["content"]:
        result["content"] = draw(st.sampled_from([None, "", []]))
    elif draw(st.booleans()):
        result["content"] = [{"type": "text", "text": result["content"]}]
    return result


def rendered(model: Model, messages: Sequence[Message]) -> str:
    tools = [SEARCH] if model.tools else []
    return model.text().template.render(messages, tools, generation_prompt=True, **VARIABLES)


def words(turn: Message) -> list[str]:
    """Return the words that must be shown of a turn: each of its parts has its own word."""
    calls = turn.get("tool_calls", [])
    text = f"{turn.get('reasoning_content', '')} {turn['content']} {' '.join(map(str, calls))}"
    return re.findall(r"(?:thought|said|ask)\d+", text)


def end_of_turn(model: Model, turn: Message) -> str:
    if model is HARMONY:
        return "<|call|>" if turn.get("tool_calls") else "<|end|>"
    if model is GLM:
        return "<|observation|>" if turn.get("tool_calls") else "<|user|>"
    return {PLAIN: "\n\n### ", GEMMA: "<end_of_turn>"}.get(model, model.eos)


def split_of(model: Model, before: str, step: _Step, after: str) -> tuple[str, str] | None:
    """Split the template's text into the turn and the rest; None if it rewrites either or the text before."""
    rest = after[len(before) :]
    shown = [rest.rfind(word) for word in words(step.turn)]
    if not after.startswith(before) or -1 in shown:
        return None
    place = rest.index(end_of_turn(model, step.turn), max(shown))
    return rest[:place], rest[place:]


def in_random_tokens(model: Model, text: str, seed: int) -> TokenIds:
    """Return a text as a policy may sample it: correct letters, in tokens that no tokenizer would choose."""
    tokenizer = model.text().tokenizer
    pattern, chance = "|".join(map(re.escape, model.specials)), random.Random(seed)
    ids: list[TokenIds] = [tokenizer.encode("")]
    for piece in re.split(f"({pattern})", text):
        if piece in model.specials:
            ids.append(tokenizer.encode(piece))
            continue
        while piece:
            n = chance.randint(1, 12)
            ids.append(tokenizer.encode_within(piece[:n]))
            piece = piece[n:]
    return np.concatenate(ids)


@pytest.mark.parametrize("model", ALL, ids=lambda model: model.name)
@settings(max_examples=12, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_prompts_hold_the_sampled_ids_and_end_like_the_template(model: Model, data: st.DataObject) -> None:
    session = TokenSession(model.text(), template_kwargs=VARIABLES)
    tokenizer = model.text().tokenizer
    tools = [SEARCH] if model.tools else []
    messages, script = data.draw(scripts(model))
    record, given_messages = RecordedConversation(), list(messages)
    expected, canonical, suffix = rendered(model, messages), True, None
    for step in [*script, None]:
        prompt = session.prompt(given_messages, tools)
        text = tokenizer.decode(prompt.ids)
        assert (prompt.begins == "") == (suffix is not None)
        if suffix is None:
            assert prompt.ids.tolist() == tokenizer.encode(expected).tolist()
            canonical = True
        else:
            held = np.concatenate([record.prompts[-1].ids, record.responses[-1]])
            assert prompt.continues == len(record.prompts) - 1
            assert np.array_equal(prompt.ids[: prompt.n_held], held)
            assert tokenizer.decode(prompt.ids[prompt.n_held :]) == suffix
        assert not canonical or text == expected
        if step is None:
            break
        before, expected = expected, rendered(model, [*messages, step.turn, *step.new])
        split = split_of(model, before, step, expected)
        sampled, suffix = split or ("something", None)
        end = "" if step.cut or model is PLAIN else end_of_turn(model, step.turn)
        if suffix is not None:
            suffix = suffix.removeprefix(end)
        # Where only text ends a call, text that is longer than the template's makes the end ambiguous.
        odd = " odd" if step.odd and not (model is PLAIN and step.turn.get("tool_calls")) else ""
        canonical = canonical and not odd
        response = in_random_tokens(model, sampled + odd + end, data.draw(st.integers(0, 2**32)))
        session.commit(prompt, response, step.turn)
        record.messages.append(list(given_messages))
        record.prompts.append(prompt)
        record.responses.append(response)
        messages = [*messages, step.turn, *step.new]
        given_messages = [*given_messages, data.draw(echoes(step.turn)), *step.new]
    fork_somewhere(data, session, record, script, tools)


def fork_somewhere(
    data: st.DataObject,
    session: TokenSession,
    record: RecordedConversation,
    script: Sequence[_Step],
    tools: Sequence[Message],
) -> None:
    """Any earlier call can be continued in another way, with its ids or with a reason."""
    number = data.draw(st.integers(0, len(script) - 1))
    other = [{**message, "content": f"{message['content']} otherwise"} for message in script[number].new]
    prompt = session.prompt([*record.messages[number], script[number].turn, *other], tools)
    held = [*record.prompts[number].ids, *record.responses[number]]
    if prompt.begins:
        assert prompt.begins.startswith("rewritten: ")
        assert prompt.continues is None
    else:
        assert prompt.continues == number
        assert prompt.ids[: prompt.n_held].tolist() == held
        assert len(prompt.ids) > len(held)
