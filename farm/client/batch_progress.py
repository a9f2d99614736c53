"""A batch's progress for a person: states by stage, rate, time left, mean reward; in a terminal, notebook or log."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table

from farm.errors import FarmUnreachable, StoreUnavailable
from farm.records.rollout import BatchStatus, Stage, State

if TYPE_CHECKING:
    from farm.client.farm import Farm

_POLL_S = 0.25
_PERIOD_S = 2.0
"""Seconds between two checks for unusual conditions."""
_LOG_INTERVAL_S = 60.0
"""Seconds between two progress lines if the output is not a terminal."""
_PAUSE_S = 1.0
_NOTEBOOK_WIDTH = 100


@dataclass(frozen=True, slots=True)
class WatchedBatch:
    """A batch while it is watched. `lines` report unusual conditions, such as an unreachable farm.

    `n_before` of its rollouts had ended when the watch began, `elapsed_s` ago.
    """

    status: BatchStatus
    n_before: int
    elapsed_s: float
    lines: Sequence[str] = ()

    @property
    def per_s(self) -> float:
        return (self.status.n_finished - self.n_before) / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """The remaining time at this rate; None until a rollout has ended."""
        left = self.status.n_rollouts - self.status.n_finished
        return left / self.per_s if self.per_s else None


def follow(
    farm: Farm,
    batch_id: str,
    timeout_s: float | None = None,
    remarks: Callable[[], Sequence[str]] | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[WatchedBatch]:
    """Yield a batch's progress on every change, and finally its end.

    Waits for a farm that stops answering after it has answered. Raises NotFound; TimeoutError after `timeout_s`.
    """
    status = farm.status(batch_id)
    n_before, started, look_at = status.n_finished, time.monotonic(), 0.0
    lines: Sequence[str] = ()
    trouble = ""
    while not is_stopped():
        now = time.monotonic()
        try:
            status = farm.status(batch_id)
            if now >= look_at and not status.done:
                lines, look_at = status.warnings if remarks is None else remarks(), now + _PERIOD_S
            trouble = ""
        except (FarmUnreachable, StoreUnavailable) as error:
            trouble = f"the farm does not answer; retrying: {error}"
        # an ended batch waits for nothing
        shown = [trouble] if trouble else [] if status.done else lines
        yield WatchedBatch(status, n_before, now - started, tuple(shown))
        if status.done and not trouble:
            return
        if timeout_s is not None and now - started > timeout_s:
            raise TimeoutError(f"batch {batch_id} has not ended after {timeout_s:g} s: {_ended(status)}")
        if trouble:
            time.sleep(_PAUSE_S)
            continue
        with contextlib.suppress(TimeoutError, FarmUnreachable, StoreUnavailable):
            farm.wait(batch_id, _POLL_S)


def watch(farm: Farm, batch_id: str, console: Console | None = None, **options: Any) -> BatchStatus:
    """Show a batch's progress until all its rollouts have ended; `options` are those of `follow`.

    If the output is neither a terminal nor a notebook, e.g. a log, prints a line per minute.
    """
    console = console or Console()
    show = _in_notebook() if console.is_jupyter else None
    is_seen = console.is_terminal and not console.is_dumb_terminal and show is None
    live = Live(console=console, refresh_per_second=8, transient=False) if is_seen else None
    say_at = 0.0
    status: BatchStatus | None = None
    with live or contextlib.nullcontext():
        for each in follow(farm, batch_id, **options):
            status = each.status
            shown = progress(status, each.n_before, each.elapsed_s, each.lines)
            if live is not None:
                live.update(shown)
            elif show is not None:
                show(shown)
            elif each.elapsed_s >= say_at or (status.done and not each.lines):
                line = _line(status, each.n_before, each.elapsed_s)
                console.print(shown if status.done else line, soft_wrap=True)
                for remark in each.lines if not status.done else ():
                    console.print(remark, markup=False, highlight=False, soft_wrap=True)
                say_at = each.elapsed_s + _LOG_INTERVAL_S
    return status if status is not None else farm.status(batch_id)


def _in_notebook() -> Callable[[RenderableType], None]:
    """Return a function that displays its argument in a notebook's cell and replaces the previous output."""
    from IPython import display

    cell: Any = display
    handle = cell.display(cell.HTML(""), display_id=True)

    def show(shown: RenderableType) -> None:
        page = Console(record=True, width=_NOTEBOOK_WIDTH, file=io.StringIO(), force_jupyter=False, highlight=False)
        page.print(shown)
        handle.update(cell.HTML(page.export_html(inline_styles=True, code_format="<pre>{code}</pre>")))

    return show


def _ended(status: BatchStatus) -> str:
    return f"{status.n_finished}/{status.n_rollouts} ended"


def _line(status: BatchStatus, n_before: int, elapsed_s: float) -> str:
    """Return a batch as one line: progress, rate, mean reward, failures."""
    per_s = (status.n_finished - n_before) / elapsed_s if elapsed_s > 0 else 0.0
    left = status.n_rollouts - status.n_finished
    eta = f", about {duration(left / per_s)} left" if per_s and left else ""
    reward = "-" if status.mean_reward is None else f"{status.mean_reward:.3f}"
    failures = ", ".join(f"{n} {kind}" for kind, n in sorted(status.failures.items())) or "none"
    # the rate is unknown if it had ended before the watch
    pace = f" in {elapsed_s:.1f} s, {per_s * 60:.3g} rollouts/min" if n_before < status.n_rollouts else ""
    return escape(f"batch {status.batch_id}: {_ended(status)}{pace}{eta}, mean reward {reward}, failures: {failures}")


def duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    days, hours, minutes, rest = (
        int(seconds // 86_400),
        int(seconds // 3600 % 24),
        int(seconds // 60 % 60),
        int(seconds % 60),
    )
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def progress(status: BatchStatus, n_before: int, elapsed_s: float, lines: Sequence[str] = ()) -> RenderableType:
    """Return a batch as a small table: per stage queued, active, done and failed; rate, time left, mean reward.

    `lines` report unusual conditions of the farm.
    """
    n_cancelled = {stage: status.stopped.get(stage, {}).get(State.CANCELLED, 0) for stage in Stage}
    columns = ("stage", "queued", "active", "done", "failed", *(("cancelled",) if any(n_cancelled.values()) else ()))
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column == "stage" else "right", no_wrap=True)
    passed = status.n_completed
    rows = []
    for stage in reversed(Stage):
        states, n_failed = status.stages[stage], status.stopped.get(stage, {}).get(State.FAILED, 0)
        counts = (states[State.QUEUED], states[State.ACTIVE], passed, n_failed, n_cancelled[stage])
        rows.append([stage.value, *map(str, counts)][: len(columns)])
        # rollouts in a stage, or ended in it, have passed the stages before it
        passed += sum(states.values()) + n_failed + n_cancelled[stage]
    for row in reversed(rows):
        table.add_row(*row)
    line = _line(status, n_before, elapsed_s)
    if status.n_mismatches or status.n_invalid_actions:
        line += f"\n{status.n_mismatches} mismatched calls, {status.n_invalid_actions} invalid tool calls"
    notes = [f"[yellow]{escape(line)}[/yellow]" for line in (*status.findings, *lines)]
    bar = Padding(ProgressBar(total=max(1, status.n_rollouts), completed=status.n_finished, width=60), (0, 0, 1, 0))
    return Group(line, bar, Padding(table, (0, 0, 1, 0)), *notes)
