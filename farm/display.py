"""What a person sees of a batch in a terminal: live progress, a table of groups, a transcript."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from farm.client import Farm
from farm.rollout import BatchStatus, Reward, Rollout, Stage, State, Timing
from farm.settings import settings
from farm.store.artefacts import KeptArtefact
from farm.store.audit import Conservation, Violation
from farm.store.nodes import BROKEN, DRAINING, PROBES, Node
from farm.trajectory import Message, ModelCall

_PERIOD_S = 0.25
_LONG = 4000


def watch(farm: Farm, batch_id: str, console: Console, check: object = None) -> BatchStatus:
    """Show a batch's progress until all its rollouts have ended. `check`, if callable, is called now and then."""
    first = farm.status(batch_id)
    started = time.monotonic()
    with Live(console=console, refresh_per_second=8, transient=False) as live:
        while True:
            status = farm.status(batch_id)
            live.update(progress(status, first.n_finished, time.monotonic() - started, farm.nodes()))
            if status.done:
                return status
            if callable(check):
                check()
            try:
                farm.wait(batch_id, _PERIOD_S)
            except TimeoutError:
                continue


def progress(status: BatchStatus, n_before: int, elapsed_s: float, nodes: Sequence[Node] = ()) -> RenderableType:
    """A batch in one small table: per stage queued, active and done; rate, mean reward and failures; unwell nodes."""
    table = Table(box=None, pad_edge=False)
    for column in ("stage", "queued", "active", "done"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    waiting_after = 0
    done = {}
    for stage in reversed(Stage):
        done[stage] = status.n_finished + waiting_after
        waiting_after += sum(status.stages[stage].values())
    for stage in Stage:
        states = status.stages[stage]
        table.add_row(stage, str(states[State.QUEUED]), str(states[State.ACTIVE]), str(done[stage]))
    rate = (status.n_finished - n_before) / elapsed_s if elapsed_s > 0 else 0.0
    reward = "-" if status.mean_reward is None else f"{status.mean_reward:.3f}"
    failures = ", ".join(f"{n} {kind}" for kind, n in sorted(status.failures.items())) or "none"
    line = (
        f"batch {status.batch_id}: {status.n_finished}/{status.n_rollouts} ended in {elapsed_s:.1f} s, "
        f"{rate:.1f} rollouts/s, mean reward {reward}, failures: {failures}"
    )
    if status.n_mismatches or status.n_invalid_actions:
        line += f"\n{status.n_mismatches} mismatched calls, {status.n_invalid_actions} invalid tool calls"
    bar = Padding(ProgressBar(total=max(1, status.n_rollouts), completed=status.n_finished, width=60), (0, 0, 1, 0))
    patients = [f"[yellow]node {escape(node.node)} {escape(why)}[/yellow]" for node in nodes if (why := unwell(node))]
    return Group(escape(line), bar, Padding(table, (0, 0, 1, 0)), *patients)


def unwell(node: Node) -> str:
    """Why a node is given nothing, or less than it has room for; empty if it is up and well."""
    if node.heartbeat_age_s > settings().node_timeout_s:
        return f"has said nothing for {node.heartbeat_age_s:.0f} s"
    if node.state == BROKEN:
        return f"takes nothing: {node.info.get(BROKEN, 'its workers end as soon as they are started')}"
    if node.state == DRAINING:
        return "takes nothing more, as it is ending"
    if node.sick_s > 0:
        until = datetime.now(UTC) + timedelta(seconds=node.sick_s)
        return f"takes nothing until {until:%H:%M:%S} UTC: {node.sick_why}"
    return f"is given {PROBES} rollouts at a time: {node.sick_why}" if node.n_trips else ""


def group_table(rollouts: Sequence[Rollout]) -> Table:
    """One line per group: its rewards, how its rollouts ended, turns and sampled tokens on average."""
    table = Table(title="groups", title_justify="left")
    drift = any(_drift([rollout]) for rollout in rollouts)
    columns = ("group", "data_source", "instance", "rewards", "outcomes", "turns", "tokens", "seconds")
    for column in (*columns, "drift") if drift else columns:
        table.add_column(column, justify="right" if column in {"turns", "tokens", "seconds"} else "left")
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
    """What is not as exact as it should be, in words; empty if all is."""
    counts = {
        "mismatched calls": sum(each.n_mismatches for each in rollouts),
        "invalid calls": sum(each.n_invalid_actions for each in rollouts),
        "rows beyond the first": sum(max(0, each.n_segments - 1) for each in rollouts),
        "restarts": sum(each.n_restarts for each in rollouts),
    }
    return ", ".join(f"{n} {what}" for what, n in counts.items() if n)


def conservation(numbers: Conservation, wrong: Sequence[Violation]) -> RenderableType:
    """Whether all of a batch is there, once: its numbers, those of groups that do not add up, and what must not be."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "submitted", "completed", "failed", "cancelled", "in flight", ""):
        table.add_column(column, justify="left" if not column else "right")
    for count in dict.fromkeys((numbers.batch, *numbers.off)):
        found = (count.n_submitted, count.n_completed, count.n_failed, count.n_cancelled, count.n_in_flight)
        verdict = "[green]adds up[/green]" if count.holds else "[red]does not add up[/red]"
        table.add_row(count.id, *map(str, found), verdict)
    colour = "red" if wrong else "green"
    line = f"[{colour}]{len(wrong)} violations[/{colour}] in {len(numbers.groups)} groups"
    return Group(table, line, *(f"[red]{escape(str(violation))}[/red]" for violation in wrong))


def failures(rollouts: Sequence[Rollout]) -> list[str]:
    """What went wrong, each message once, with how many rollouts ended so."""
    messages: dict[str, list[str]] = {}
    for rollout in rollouts:
        if rollout.state is State.FAILED and rollout.failure is not None:
            plain = rollout.failure.message.removeprefix(f"{rollout.rollout_id}: ")
            messages.setdefault(f"{rollout.failure.kind}: {plain}", []).append(rollout.rollout_id)
    return [f"{len(ids)} failed ({ids[0]}{', …' if len(ids) > 1 else ''}) {text}" for text, ids in messages.items()]


def transcript(
    rollout: Rollout, calls: Sequence[ModelCall], timings: Sequence[Timing], rewards: Sequence[Reward]
) -> RenderableType:
    """Everything a rollout did, in order, then its times and rewards."""
    parts: list[RenderableType] = [_headline(rollout)]
    for call in calls:
        parts += [_message(message) for message in call.messages]
        parts.append(_message(call.response, _call_note(call)))
        parts += [f"[yellow]{escape(remark)}[/yellow]" for remark in _remarks(call)]
        parts += [_message(message) for message in call.observations]
    parts += [_times(timings), _scores(rewards)]
    return Group(*parts)


def _call_note(call: ModelCall) -> str:
    """How a call came about, in one line."""
    cached = "" if call.n_cached_tokens is None else f" ({call.n_cached_tokens} cached)"
    notes = [
        f"call {call.index}",
        f"{call.n_prompt_tokens}{cached} + {call.n_response_tokens} tokens",
        f"{call.latency_s:.2f} s",
        call.finish_reason,
        "token-exact" if call.token_exact else "text only",
        f"version {call.policy_version or '?'}",
    ]
    return escape(" · ".join(notes))


def _remarks(call: ModelCall) -> list[str]:
    """What is out of the ordinary about a call, a line each."""
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
    """One line per artefact; `farm artefacts ROLLOUT NAME` fetches one."""
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
    """What its earlier attempts were counted as."""
    counts = {"failed": rollout.n_failures, "lost": rollout.n_lost, "played anew": rollout.n_restarts}
    said = ", ".join(f"{n} {what}" for what, n in counts.items() if n)
    return f" ({said})" if said else ""


def _weights(rollout: Rollout) -> str:
    """Which weights sampled it, as far as they have numbers."""
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
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
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
