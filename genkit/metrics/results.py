"""Rows of evidence: one JSON line a measurement, and the tables made from them."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from genkit.errors import ConfigError
from genkit.serialization import installed_versions

__all__ = ["ResultRow", "append_rows", "mean_interval", "read_rows", "rows_of_configuration", "summary_table"]


@dataclass(frozen=True)
class ResultRow:
    """One measured number.

    Args:
        method, arm, setting: which method, which variant of it (or baseline), and how it was measured.
        config_hash: of the configuration that decides the arm's weights, with its seed; of the data alone for a
            baseline that has none.
        seed: of training and sampling.
        metric, value: what was measured.
        n: how many samples or days the value is computed from.
        seconds: wall time of the arm's training and measurement.
        versions: of the packages that matter.
    """

    method: str
    arm: str
    setting: str
    config_hash: str
    seed: int
    metric: str
    value: float
    n: int
    seconds: float
    versions: dict[str, str] = field(default_factory=installed_versions)


def read_rows(path: str | Path) -> list[ResultRow]:
    """All rows of a JSON-lines file; none where it does not exist.

    Raises:
        ConfigError: a line that is no row (the message names it).
    """
    path = Path(path)
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows.append(ResultRow(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number}: not a row of results ({error}); delete or mend the line"
            ) from error
    return rows


def rows_of_configuration(path: str | Path, hashes: Container[str], setting: str | None = None) -> list[ResultRow]:
    """The rows whose configuration has one of ``hashes`` (and, where it is given, of one setting).

    Raises:
        ConfigError: there are none.
    """
    rows = [row for row in read_rows(path) if row.config_hash in hashes and setting in (None, row.setting)]
    if not rows:
        raise ConfigError(
            f"{path} holds no rows of this configuration; measure them by leaving out --table, or name the folder that "
            "has them (--results-dir, by default docs/results of the current folder)"
        )
    return rows


def append_rows(path: str | Path, rows: Iterable[ResultRow]) -> None:
    """Adds rows at the end of a JSON-lines file, in one write."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(asdict(row), sort_keys=True) + "\n" for row in rows)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % confidence interval (Student-t over the seeds); NaN width for one value."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return mean, math.nan
    from scipy.stats import t as student_t

    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return mean, float(student_t.ppf(0.975, n - 1)) * math.sqrt(variance / n)


def summary_table(rows: Sequence[ResultRow], metrics: Sequence[str], arms: Sequence[str], digits: int = 3) -> str:
    """A Markdown table, one line an arm and one column a metric: mean ± half-width of the 95 % interval over seeds."""
    lines = ["| arm | seeds | " + " | ".join(metrics) + " |", "|" + "---|" * (len(metrics) + 2)]
    for arm in arms:
        mine = [row for row in rows if row.arm == arm]
        seeds = len({row.seed for row in mine})
        cells = [_cell([row.value for row in mine if row.metric == metric], digits) for metric in metrics]
        lines.append(f"| {arm} | {seeds} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(values: Sequence[float], digits: int) -> str:
    if not values:
        return "–"
    mean, half = mean_interval(values)
    return f"{mean:.{digits}f}" if math.isnan(half) else f"{mean:.{digits}f} ± {half:.{digits}f}"
