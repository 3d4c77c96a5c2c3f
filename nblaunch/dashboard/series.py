"""Metrics as series: which one stands in a rank's row, and which share a chart."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from nblaunch.dashboard import formats

if TYPE_CHECKING:
    from nblaunch.dashboard.state import RunState

DATA_WAIT = "data_wait"
"""A metric of this name, 0 to 1, is the share of a step that a rank waited for data: a column, no chart."""

_ROLES = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "eval": "val", "dev": "val",
    "test": "test",
}  # fmt: skip


def main_metric(state: RunState) -> str:
    """The metric that stands in each rank's row: a loss if there is one, else the first that was logged."""
    names = [name for name in state.metrics if name != DATA_WAIT]
    for fits in (
        lambda n: split_role(n)[0] == "loss" and split_role(n)[1] != "val",
        lambda n: "loss" in n.lower(),
    ):
        for name in names:
            if fits(name):
                return name
    return names[0] if names else ""


def split_role(name: str) -> tuple[str, str]:
    """A metric's name without the word for its data, and that word: "train", "val", "test", or "".

    Example:
        >>> split_role("train/loss"), split_role("val_loss"), split_role("loss"), split_role("evaluate")
        (('loss', 'train'), ('loss', 'val'), ('loss', ''), ('evaluate', ''))
    """
    words = re.split(r"([/_. -])", name)
    for at, rest in ((0, words[2:]), (-1, words[:-2])):
        role = _ROLES.get(words[at].lower())
        if role and "".join(rest).strip("/_. -"):
            return "".join(rest), role
    return name, ""


def charts(state: RunState) -> list[dict[str, Any]]:
    """Which series share a chart: its title, and of each series the metric, a label, and the last values."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, curve in state.metrics.items():
        if name == DATA_WAIT and all(0 <= value <= 1 for value in curve.last.values()):
            continue
        title, role = split_role(name)
        last = list(curve.last.values())
        found.setdefault(title, []).append({
            "metric": name,
            "label": role or name,
            "now": formats.number(sum(last) / len(last)),
            "low": formats.number(min(last)),
            "high": formats.number(max(last)),
            "bad": f"not finite from step {curve.bad[0]:,} on rank {curve.bad[1]}" if curve.bad else "",
            "step": curve.step,
        })  # fmt: skip
    return [
        {
            "title": title if len(series) > 1 else series[0]["metric"],
            "series": sorted(series, key=lambda s: s["label"] == "val"),
        }
        for title, series in found.items()
    ]
