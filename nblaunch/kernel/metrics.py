"""The metrics of a run as a table of columns."""

from __future__ import annotations

import array
from collections.abc import Iterable
from typing import Any

from nblaunch.wire.messages import Metrics


class MetricsTable:
    """What the ranks logged, one row a value, in columns: `step`, `name`, `rank`, `value`, `time`.

    Example:
        >>> table = MetricsTable([])
        >>> len(table), table.names
        (0, [])
    """

    COLUMNS = ("step", "name", "rank", "value", "time")

    def __init__(self, batches: Iterable[Metrics]) -> None:
        self.step: list[int] = []
        self.name: list[str] = []
        self.rank: list[int] = []
        self.value: list[float] = []
        self.time: list[float] = []
        """Seconds since the epoch."""
        self.thinned = 0
        """Values that are not here because a rank logged more than 1,000 a second."""
        for batch in batches:
            self._add(batch)

    def _add(self, batch: Metrics) -> None:
        which = array.array("i", batch.which)
        self.name.extend([batch.names[index] for index in which])
        self.rank.extend([batch.rank] * len(which))
        self.step.extend(array.array("q", batch.steps))
        self.value.extend(array.array("d", batch.values))
        self.time.extend(array.array("d", batch.times))
        self.thinned += batch.thinned

    @property
    def names(self) -> list[str]:
        """The metrics' names, in the order in which they first came."""
        return list(dict.fromkeys(self.name))

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, column: str) -> list[Any]:
        """A column by its name."""
        if column not in self.COLUMNS:
            raise KeyError(f"{column!r} is no column; there are {', '.join(self.COLUMNS)} (metrics: {self.names})")
        return getattr(self, column)

    def values(self, name: str, rank: int | None = None) -> list[float]:
        """The values of one metric, of all ranks or of one, in the order in which they came."""
        rows = zip(self.name, self.rank, self.value, strict=True)
        return [value for found, of, value in rows if found == name and rank in (None, of)]

    def to_dict(self) -> dict[str, list[Any]]:
        """The columns by name."""
        return {column: getattr(self, column) for column in self.COLUMNS}

    def to_pandas(self) -> Any:
        """A pandas DataFrame with these columns.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas

        return pandas.DataFrame(self.to_dict())

    def __repr__(self) -> str:
        last = {name: value for name, value in zip(self.name, self.value, strict=True)}
        shown = ", ".join(f"{name}={value:.4g}" for name, value in list(last.items())[:8])
        return f"<MetricsTable: {len(self):,} values; last {shown}>" if last else "<MetricsTable: empty>"
