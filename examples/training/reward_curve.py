"""The curve of a training run: one line per step on the terminal, a table in `curve.csv`, a plot in `curve.png`.

Both files are rewritten from all steps so far, so a run that was killed and restarted has each step once.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from farm.adapters.arrays import Arrays
from farm.records.rollout import Rollout

Step: TypeAlias = Mapping[str, float]
"""One row: column name to number."""

_BAR = 40


def summary(step: int, rollouts: Sequence[Rollout], rows: Arrays, largest_gap: float) -> dict[str, float]:
    """Return the numbers of a step: its scores, over all scored rollouts, and the rows that it trains on."""
    scores = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    versions = rows.policy_versions[rows.response_mask == 1]
    return {
        "step": step,
        "reward": sum(scores) / len(scores),
        "n_rollouts": len(rollouts),
        "n_unscored": len(rollouts) - len(scores),
        "n_rows": len(rows),
        "n_tokens": len(versions),
        "largest_gap": largest_gap,
        "oldest_version": int(versions.min()),
        "newest_version": int(versions.max()),
        # on-policy weights are those of the previous step
        "off_policy_share": float((versions < step - 1).mean()),
    }


def show(row: Step) -> str:
    """Return a step as a line for the terminal."""
    bar = "█" * round(_BAR * row["reward"])
    share = row.get("off_policy_share", 0.0)
    off = f"  {100 * share:.0f} % of the tokens off-policy" if share else ""
    return (
        f"step {row['step']:3.0f}  reward {row['reward']:.3f} {bar:<{_BAR}}  "
        f"rollouts {row['rollout_s']:.1f} s  train {row['train_s']:.1f} s  push {row['push_s']:.1f} s  "
        f"gap {row['largest_gap']:.0e}{off}"
    )


def write(steps: Sequence[Step], folder: Path) -> None:
    """Write `curve.csv` and `curve.png`."""
    write_table(steps, folder)
    draw(steps, folder)


def write_table(steps: Sequence[Step], folder: Path) -> None:
    """Write `curve.csv` atomically."""
    table = folder / "curve.csv.partial"
    with table.open("w", newline="") as file:
        rows = csv.DictWriter(file, fieldnames=list(steps[0]))
        rows.writeheader()
        rows.writerows(steps)
    table.replace(folder / "curve.csv")


def read_table(folder: Path) -> list[Step]:
    """Return the steps of `curve.csv`."""
    with (folder / "curve.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def draw(steps: Sequence[Step], folder: Path) -> None:
    """Write `curve.png`; needs matplotlib."""
    import matplotlib as mpl  # type: ignore[import-not-found, unused-ignore]

    mpl.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found, unused-ignore]

    figure, (rewards, gaps) = pyplot.subplots(2, 1, sharex=True, height_ratios=(3, 1), figsize=(7, 6))
    numbers = [row["step"] for row in steps]
    rewards.plot(numbers, [row["reward"] for row in steps], marker="o")
    rewards.set(ylabel="mean reward", ylim=(0, 1))
    gaps.semilogy(numbers, [row["largest_gap"] for row in steps], marker=".", color="tab:gray")
    gaps.set(xlabel="step", ylabel="largest gap of\nlog-probabilities")
    for axes in (rewards, gaps):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(folder / "curve.png", dpi=120)
    pyplot.close(figure)
