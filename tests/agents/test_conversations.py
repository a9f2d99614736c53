"""Additional conversations: a sub-agent's, and the one that follows a compaction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from farm.records.trajectory import Message
from tests.agents.issue_rollout import FIX, SWE, job_of, run_with_script
from tests.services.entry_points import installed
from workers.testing.scripted_model import DONE, GIVE_UP, OrderedScript, ScriptedCall, ScriptedTurn

PROJECT = Path(__file__).parent / "project"
ISSUE = SWE.problem_statement[:60]


def turn(content: str, name: str, **arguments: object) -> ScriptedTurn:
    return ScriptedTurn(content=content, tool_calls=(ScriptedCall(name=name, arguments=dict(arguments)),))


def users(messages: Sequence[Message]) -> str:
    return " ".join(str(each.get("content")) for each in messages if each["role"] == "user")


class WithHelper(OrderedScript):
    """The turns of an agent, and those of another whose task has the word HELPER."""

    def __init__(self, turns: Sequence[ScriptedTurn], helper: Sequence[ScriptedTurn]) -> None:
        super().__init__(turns, ISSUE)
        self._helper = OrderedScript(helper, "HELPER")

    def next_turn(self, messages: Sequence[Message], seed: int | None, begun: str = "") -> ScriptedTurn:
        if "HELPER" in users(messages) and ISSUE not in users(messages):
            return self._helper.next_turn(messages, seed, begun)
        return super().next_turn(messages, seed, begun)


class Summing(OrderedScript):
    """Turns by progress: a request for a summary is answered with one, and the work continues after it."""

    def __init__(self) -> None:
        super().__init__([], ISSUE)
        self._work = iter([turn("I look.", "exec_command", cmd="ls"), turn("I fix it.", "exec_command", cmd=FIX)])

    def next_turn(self, messages: Sequence[Message], seed: int | None, begun: str = "") -> ScriptedTurn:
        if not messages:
            # it is probed
            return GIVE_UP
        if "CONTEXT CHECKPOINT COMPACTION" in str(messages[-1].get("content")):
            return ScriptedTurn(content="I looked at the files.")
        return next(self._work, DONE)


@pytest.fixture
def _variants(tmp_path: Path) -> Iterator[None]:
    with installed(PROJECT, tmp_path):
        yield


def test_sub_agent_of_claude_code_has_its_own_rows() -> None:
    delegated = turn(
        "Somebody else.", "Agent", description="fix it", prompt="HELPER: fix", subagent_type="general-purpose"
    )
    helper = [turn("I fix it.", "Bash", command=FIX), ScriptedTurn(content="It is fixed.")]
    trial = run_with_script(job_of("claude-code", "namespace"), WithHelper([delegated, DONE], helper))
    assert trial.reward == 1.0, trial
    assert len(trial.rows) == 2
    assert trial.breaks == ["branch: no earlier call had these tools"]


@pytest.mark.usefixtures("_variants")
def test_compaction_of_codex_begins_a_row() -> None:
    trial = run_with_script(job_of("codex-compacting", "namespace"), Summing())
    assert trial.reward == 1.0, trial
    assert len(trial.rows) > 1, trial.breaks
