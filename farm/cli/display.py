"""Display of batches in a terminal: live progress, tables, transcripts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from farm.cli.readiness import remarks
from farm.client import batch_progress
from farm.client.batch_progress import duration
from farm.records.rollout import (
    BatchStatus,
    BatchSummary,
    Conservation,
    KeptArtefact,
    Reward,
    Rollout,
    State,
    Timing,
    Violation,
)
from farm.records.trajectory import Message, ModelCall

if TYPE_CHECKING:
    from farm.client.farm import Farm

_LONG = 4000
_ANY_WIDTH = 10_000


def watch(
    farm: Farm, batch_id: str, console: Console, check: Callable[[], Any] | None = None, timeout_s: float | None = None
) -> BatchStatus:
    """Show a batch's progress, and problems of nodes and engines, until it has ended.

    `check` is called repeatedly, and may raise. Raises TimeoutError.
    """

    def lines() -> list[str]:
        return remarks(farm.nodes(), farm.engines())

    def is_stopped() -> bool:
        if check is not None:
            check()
        return False

    return batch_progress.watch(farm, batch_id, console, timeout_s=timeout_s, remarks=lines, is_stopped=is_stopped)


def print_whole(console: Console, table: Table) -> None:
    """Print a table with complete cells, so that ids can be copied: a narrow terminal wraps its lines."""
    width = console.width
    # the console would cut the table to its own width
    console.width = max(width, console.measure(table, options=console.options.update(width=_ANY_WIDTH)).minimum)
    try:
        console.print(table, crop=False, overflow="ignore", no_wrap=True)
    finally:
        console.width = width


def batch_table(batches: Sequence[BatchSummary]) -> Table:
    """Return a table with a line per batch: id, state, progress, age, mean reward, submitter, kinds of problems."""
    table = Table(box=None, pad_edge=False)
    table.add_column("batch", no_wrap=True)
    for column in ("state", "ended", "failed", "age", "mean reward"):
        table.add_column(column, no_wrap=True, justify="left" if column == "state" else "right")
    table.add_column("by", overflow="fold", min_width=5)
    table.add_column("problems", overflow="fold")
    for each in batches:
        table.add_row(
            each.batch_id,
            each.state.value,
            f"{each.n_completed + each.n_failed + each.n_cancelled}/{each.n_rollouts}",
            str(each.n_failed),
            duration(each.age_s),
            "-" if each.mean_reward is None else f"{each.mean_reward:.3f}",
            escape(each.submitter),
            escape(", ".join(each.data_sources)),
        )
    return table


def group_table(rollouts: Sequence[Rollout]) -> Table:
    """Return a table with a line per group: rewards, outcomes, mean turns and sampled tokens.

    Adds a column for the counts of `drift`, if any.
    """
    table = Table(title="groups", title_justify="left", box=None, pad_edge=False)
    drift = any(_drift([rollout]) for rollout in rollouts)
    columns = ("group", "data_source", "instance", "rewards", "outcomes", "turns", "tokens", "seconds")
    for column in (*columns, "drift") if drift else columns:
        justify: Literal["left", "right"] = "right" if column in {"turns", "tokens", "seconds"} else "left"
        is_long = column in {"instance", "rewards", "outcomes", "drift"}
        table.add_column(
            column, justify=justify, no_wrap=not is_long, overflow="fold", min_width=8 if is_long else None
        )
    groups: defaultdict[int, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group_index].append(rollout)
    for index in sorted(groups):
        members = groups[index]
        table.add_row(
            members[0].group_id,
            members[0].data_source,
            escape(members[0].instance_id),
            " ".join("-" if each.reward is None else f"{each.reward:g}" for each in members),
            ", ".join(sorted({str(each.outcome or each.state) for each in members})),
            f"{sum(each.n_turns for each in members) / len(members):.1f}",
            f"{sum(each.n_response_tokens for each in members) / len(members):.0f}",
            f"{max((each.finished_at or each.submitted_at) - each.submitted_at for each in members):.1f}",
            *([_drift(members)] if drift else []),
        )
    return table


def _drift(rollouts: Sequence[Rollout]) -> str:
    """Return the non-zero counts of mismatches, invalid calls, extra rows and restarts, in words."""
    counts = {
        "mismatched calls": sum(each.n_mismatches for each in rollouts),
        "invalid calls": sum(each.n_invalid_actions for each in rollouts),
        "rows beyond the first": sum(max(0, each.n_segments - 1) for each in rollouts),
        "restarts": sum(each.n_restarts for each in rollouts),
    }
    return ", ".join(f"{n} {what}" for what, n in counts.items() if n)


def conservation(numbers: Conservation, wrong: Sequence[Violation]) -> RenderableType:
    """Return a table of a batch's counts and of the groups that do not add up, followed by all violations."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "submitted", "completed", "failed", "cancelled", "in flight", ""):
        table.add_column(column, justify="left" if not column else "right", overflow="fold")
    for count in dict.fromkeys((numbers.batch, *numbers.off)):
        counts = (count.n_submitted, count.n_completed, count.n_failed, count.n_cancelled, count.n_in_flight)
        decision = "[green]adds up[/green]" if count.holds else "[red]does not add up[/red]"
        table.add_row(count.id, *map(str, counts), decision)
    colour = "red" if wrong else "green"
    line = f"[{colour}]{len(wrong)} violations[/{colour}] in {len(numbers.groups)} groups"
    return Group(table, line, *(f"[red]{escape(str(violation))}[/red]" for violation in wrong))


def failures(rollouts: Sequence[Rollout]) -> list[str]:
    """Return each distinct message of failed rollouts, with the number of rollouts."""
    messages: dict[str, list[str]] = {}
    for rollout in rollouts:
        if rollout.state is State.FAILED and rollout.failure is not None:
            plain = rollout.failure.message.removeprefix(f"{rollout.rollout_id}: ")
            messages.setdefault(f"{rollout.failure.kind}: {plain}", []).append(rollout.rollout_id)
    return [f"{len(ids)} failed ({ids[0]}{', …' if len(ids) > 1 else ''}) {text}" for text, ids in messages.items()]


def transcript(
    rollout: Rollout, calls: Sequence[ModelCall], timings: Sequence[Timing], rewards: Sequence[Reward]
) -> RenderableType:
    """Return the transcript of a rollout in order, then its times and rewards."""
    parts: list[RenderableType] = [_headline(rollout)]
    for call in calls:
        parts += [_message(message) for message in call.messages]
        parts.append(_message(call.response, _call_note(call)))
        parts += [f"[yellow]{escape(remark)}[/yellow]" for remark in _remarks(call)]
        parts += [_message(message) for message in call.observations]
    parts += [_times(timings), _scores(rewards)]
    return Group(*parts)


def _call_note(call: ModelCall) -> str:
    """Return a model call as one line: tokens, latency, finish reason, version."""
    cached = "" if call.n_cached_tokens is None else f" ({call.n_cached_tokens} cached)"
    notes = [
        f"call {call.index}",
        *([] if call.reward is None else [f"reward {call.reward:g}"]),
        f"{call.n_prompt_tokens}{cached} + {call.n_response_tokens} tokens",
        f"{call.latency_s:.2f} s",
        call.finish_reason,
        "token-exact" if call.token_exact else "text only",
        f"version {call.policy_version or '?'}",
        *(f"{name} {value}" for name, value in sorted(call.labels.items())),
    ]
    return escape(" · ".join(notes))


def _remarks(call: ModelCall) -> list[str]:
    """Return the unusual facts about a model call, a line each."""
    remarks = []
    if len({span.version for span in call.versions}) > 1:
        spans = ", ".join(f"{span.version} for [{span.start}, {span.end})" for span in call.versions)
        remarks.append(f"call {call.index} was sampled by several versions: {spans}")
    if call.begins and call.begins != "first":
        remarks.append(f"call {call.index} begins a training row: {call.begins}")
    if call.n_invalid:
        remarks.append(f"call {call.index}: {call.n_invalid} invalid tool calls")
    if call.mismatch is not None:
        remarks.append(
            f"call {call.index}: the engine saw another token than it was sent at position {call.mismatch}; its row "
            "does not train"
        )
    return remarks


def artefact_table(kept: Sequence[KeptArtefact]) -> Table:
    """Return a table with a line per artefact; `farm artefacts ROLLOUT NAME` fetches one."""
    table = Table(title="artefacts", title_justify="left", box=None, pad_edge=False)
    for column in ("name", "kind", "bytes", "stored"):
        table.add_column(column, justify="right" if column in {"bytes", "stored"} else "left", overflow="fold")
    for each in kept:
        table.add_row(escape(each.name), each.media_type, str(each.n_bytes), str(each.n_stored))
    return table


def _headline(rollout: Rollout) -> str:
    reward = "none" if rollout.reward is None else f"{rollout.reward:g}"
    line = (
        f"[bold]rollout {rollout.rollout_id}[/bold] ({escape(rollout.data_source)} {escape(rollout.instance_id)}): "
        f"{rollout.state}, outcome {rollout.outcome or '-'}, reward {reward}, attempt {rollout.attempt}"
        f"{_spent(rollout)}, {rollout.n_turns} turns, {rollout.n_response_tokens} sampled tokens{_weights(rollout)}"
    )
    if drift := _drift([rollout]):
        line += f"\n[yellow]{drift}[/yellow]"
    if rollout.failure is not None:
        line += f"\n[red]{rollout.failure.kind}[/red]: {escape(rollout.failure.message)}"
    return line


def _spent(rollout: Rollout) -> str:
    """Return the counts of its earlier attempts by kind, in words; empty if there were none."""
    counts = {"failed": rollout.n_failures, "lost": rollout.n_lost, "restarted": rollout.n_restarts}
    text = ", ".join(f"{n} {what}" for what, n in counts.items() if n)
    return f" ({text})" if text else ""


def _weights(rollout: Rollout) -> str:
    """Return the range of weight versions that sampled it, in words; empty if they have no numbers."""
    if rollout.version_min is None:
        return ""
    if rollout.version_min == rollout.version_max:
        return f" of version {rollout.version_min}"
    return f" of versions {rollout.version_min} to {rollout.version_max}"


_COLOURS = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def _message(message: Message, note: str = "") -> Panel:
    role = str(message.get("role", "?"))
    text = _short(_text(message.get("content")))
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        text = f"(thinks) {_short(_text(reasoning).strip())}\n\n{text}"
    for call in message.get("tool_calls") or []:
        function = call["function"]
        text += f"\n→ {function['name']}({_arguments(function['arguments'])})"
    title = role if not message.get("tool_call_id") else f"{role} result"
    colour = _COLOURS.get(role, "white")
    return Panel(escape(text.strip()), title=title, subtitle=note or None, title_align="left", border_style=colour)


def _text(content: object) -> str:
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        return "".join(str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]" for part in parts)
    return "" if content is None else str(content)


def _arguments(raw: str) -> str:
    try:
        values = json.loads(raw)
    except ValueError:
        return raw
    if not isinstance(values, dict):
        return raw
    if len(values) == 1 and isinstance(only := next(iter(values.values())), str) and "\n" in only:
        return f"\n{_short(only.rstrip())}\n"
    return ", ".join(f"{name}={_short(json.dumps(value, ensure_ascii=False))}" for name, value in values.items())


def _short(text: str) -> str:
    if len(text) <= _LONG:
        return text
    return f"{text[: _LONG // 2]}\n[… {len(text) - _LONG} characters …]\n{text[-_LONG // 2 :]}"


def _times(timings: Sequence[Timing]) -> Table:
    table = Table(title="stages", title_justify="left")
    for column in ("attempt", "stage", "node", "queued s", "work s", "result"):
        table.add_column(column)
    for timing in timings:
        table.add_row(
            str(timing.attempt),
            timing.stage,
            timing.node or "-",
            _seconds(timing.queued_s),
            _seconds(timing.work_s),
            (timing.result or "active") + (f": {escape(timing.failure.message)}" if timing.failure else ""),
        )
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _scores(rewards: Sequence[Reward]) -> Table:
    table = Table(title="rewards", title_justify="left")
    for column in ("reward", "evaluator", "details"):
        table.add_column(column)
    for reward in rewards:
        table.add_row(f"{reward.value:g}", reward.evaluator, escape(_short(json.dumps(reward.details))))
    return table
