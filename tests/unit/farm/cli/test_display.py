"""Display for people: complete, and text is never interpreted as markup."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from farm.cli import display
from farm.client.batch_progress import progress
from farm.records.rollout import (
    BatchStatus,
    BatchSummary,
    Failure,
    KeptArtefact,
    Outcome,
    Reward,
    Rollout,
    Stage,
    State,
    Timing,
)
from farm.records.trajectory import ModelCall, VersionSpan


def shown(what: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(what)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def rollout(sample: int, outcome: Outcome, reward: float | None, failure: Failure | None = None) -> Rollout:
    return Rollout(
        rollout_id=f"b1.0.{sample}",
        batch_id="b1",
        group_index=0,
        sample_index=sample,
        data_source="math",
        instance_id="[red]gcd[/red]",
        stage=Stage.EVAL,
        state=State.FAILED if failure else State.COMPLETED,
        attempt=2,
        node="n1",
        outcome=outcome,
        reward=reward,
        failure=failure,
        n_turns=3,
        n_response_tokens=40,
        submitted_at=100.0,
        finished_at=104.5,
        finish_seq=1,
    )


def test_progress_counts_rollouts_that_left_each_stage_and_ended_in_it() -> None:
    queued = {stage: {State.QUEUED: 0, State.ACTIVE: 0} for stage in Stage}
    queued[Stage.INIT] = {State.QUEUED: 5, State.ACTIVE: 1}
    queued[Stage.RUN] = {State.QUEUED: 2, State.ACTIVE: 3}
    stopped = {stage: {State.FAILED: 0, State.CANCELLED: 0} for stage in Stage}
    stopped[Stage.RUN][State.FAILED] = 2
    status = BatchStatus("b1", 20, 7, 2, 0, queued, {"engine_error": 2}, 0.25, 0.0, stopped=stopped)
    text = shown(progress(status, 1, 4.0))
    expected = "9/20 ended in 4.0 s, 120 rollouts/min, about 5 s left, mean reward 0.250, failures: 2 engine_error"
    assert expected in text
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["init"], ["run"], ["eval"])]
    assert rows == [["init", "5", "1", "14", "0"], ["run", "2", "3", "7", "2"], ["eval", "0", "0", "7", "0"]]
    assert "cancelled" not in text
    stopped[Stage.EVAL][State.CANCELLED] = 3
    status = replace(status, n_cancelled=3, n_rollouts=23)
    rows = [line.split() for line in shown(progress(status, 1, 4.0)).splitlines() if "eval" in line]
    assert rows == [["eval", "0", "0", "7", "0", "3"]]


def test_batch_that_had_ended_before_shows_no_rate() -> None:
    status = BatchStatus("b1", 2, 2, 0, 0, {stage: dict.fromkeys(State, 0) for stage in Stage}, {}, 1.0, 0.0)
    assert "batch b1: 2/2 ended, mean reward 1.000, failures: none" in shown(progress(status, 2, 0.1))


def test_task_findings_are_shown_for_an_ended_batch() -> None:
    stages = {stage: dict.fromkeys(State, 0) for stage in Stage}
    status = BatchStatus("b1", 2, 2, 0, 0, stages, {}, 1.0, 0.0, findings=("1 of 2 tasks is [vacuous] (a)",))
    assert "1 of 2 tasks is [vacuous] (a)" in shown(progress(status, 2, 0.1))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.9, "59 s"), (200, "3 min 20 s"), (7320, "2 h 2 min"), (200_000, "2 d 7 h")]
)
def test_remaining_time_is_shown_in_its_two_largest_units(seconds: float, text: str) -> None:
    status = BatchStatus("b1", 2, 1, 0, 0, {stage: dict.fromkeys(State, 0) for stage in Stage}, {}, 1.0, 0.0)
    assert f", about {text} left, " in " ".join(shown(progress(status, 0, seconds)).split())


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 160])
def test_ids_are_never_cut(width: int) -> None:
    """In a narrow terminal the terminal wraps a longer line, so that the id can still be copied."""
    ids = [f"b0123456789.{index}" for index in (0, 7, 1023)]
    rollouts = [
        replace(
            rollout(0, Outcome.SUBMITTED, 0.5),
            batch_id="b0123456789",
            group_index=int(each.rpartition(".")[2]),
            instance_id="a very long name of an instance " * 4,
        )
        for each in ids
    ]
    summary = BatchSummary(
        "b0123456789", State.ACTIVE, 9, 4, 0, 0, None, 0.0, 3.0, 0, ("math", "a-long-data-source" * 3)
    )
    console = Console(file=io.StringIO(), width=width)
    display.print_whole(console, display.group_table(rollouts))
    display.print_whole(console, display.batch_table([summary]))
    file = console.file
    assert isinstance(file, io.StringIO)
    words = file.getvalue().split()
    assert {*ids, "b0123456789"} <= {*words}
    assert "…" not in file.getvalue()


def test_group_shows_every_reward_and_a_dash_for_none() -> None:
    broken = rollout(1, Outcome.ENGINE_ERROR, None, Failure("engine_error", "b1.0.1: it is [gone]"))
    text = shown(display.group_table([rollout(0, Outcome.SUBMITTED, 0.5), broken]))
    assert "0.5 -" in text
    assert "[red]gcd[/red]" in text
    assert "engine_error, submitted" in text
    assert display.failures([broken, broken]) == ["2 failed (b1.0.1, …) engine_error: it is [gone]"]


def test_transcript_shows_calls_results_times_and_rewards() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"command": "a\\n[b]"}'}}
    model_call = ModelCall(
        index=0,
        messages=[{"role": "user", "content": "Find [it]."}],
        response={"role": "assistant", "content": None, "tool_calls": [call]},
        finish_reason="tool_calls",
        engine="e",
        started_at=0.0,
        latency_s=0.25,
        n_prompt_tokens=10,
        n_response_tokens=4,
        observations=[{"role": "tool", "tool_call_id": "c", "content": "x" * 10_000}],
    )
    timing = Timing(2, Stage.RUN, 1.0, 1.5, 3.0, "n1", "lost", Failure("lost", "the worker was lost"))
    text = shown(
        display.transcript(
            rollout(0, Outcome.SUBMITTED, 1.0), [model_call], [timing], [Reward(1.0, {"why": "[so]"}, "answer", 0.0)]
        )
    )
    for part in ("Find [it].", "[b]", "10 + 4 tokens", "text only", "… 6000 characters …", "0.500", "1.500"):
        assert part in text, part
    for part in ("lost: the worker was lost", '"why": "[so]"', "attempt 2", "3 turns", "40 sampled tokens"):
        assert part in text, part


def test_only_inexact_tokens_are_mentioned() -> None:
    plain = rollout(0, Outcome.SUBMITTED, 1.0)
    off = replace(plain, n_mismatches=2, n_invalid_actions=3, n_segments=4, n_restarts=1, version_min=3, version_max=5)
    drift = "2 mismatched calls, 3 invalid calls, 3 rows beyond the first, 1 restarts"
    model_call = ModelCall(
        index=7,
        messages=[],
        response={"role": "assistant", "content": "so", "reasoning_content": "hm [x]"},
        finish_reason="stop",
        engine="e",
        started_at=0.0,
        latency_s=0.25,
        n_prompt_tokens=10,
        n_response_tokens=4,
        policy_version="3",
        versions=(VersionSpan("3", 0, 1), VersionSpan("5", 1, 4)),
        n_cached_tokens=8,
        n_invalid=2,
        begins="rewritten: [message 3]",
        mismatch=6,
    )
    text = shown(display.transcript(off, [model_call], [], []))
    for part in (drift, "of versions 3 to 5", "10 (8 cached) + 4 tokens", "3 for [0, 1), 5 for [1, 4)", "hm [x]"):
        assert part in text, part
    for part in ("begins a training row: rewritten: [message 3]", "2 invalid tool calls", "sent at position 6"):
        assert part in text, part
    table = " ".join(shown(display.group_table([plain, off])).split())
    assert "drift" in table
    assert "2 mismatched" in table
    ordinary = shown(display.transcript(plain, [replace(model_call, versions=(), n_invalid=0, begins="first")], [], []))
    ordinary += shown(display.group_table([plain]))
    assert "drift" not in ordinary
    assert "training row:" not in ordinary
    status = BatchStatus("b1", 1, 1, 0, 0, {stage: dict.fromkeys(State, 0) for stage in Stage}, {}, 1.0, 0.0, 2, 3)
    assert "2 mismatched calls, 3 invalid tool calls" in shown(progress(status, 0, 1.0))


def test_artefacts_are_listed_with_name_type_and_size() -> None:
    text = shown(display.artefact_table([KeptArtefact("3-[bash].txt", "text/plain", 4_000_000, 1234, 1, 0.0)]))
    assert [line.split() for line in text.splitlines()[-1:]] == [["3-[bash].txt", "text/plain", "4000000", "1234"]]
