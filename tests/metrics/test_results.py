"""Rows of evidence and their tables."""

import math

import pytest

from genkit.errors import ConfigError
from genkit.metrics.results import ResultRow, append_rows, mean_interval, read_rows, summary_table


def row(arm, seed, value, metric="error"):
    return ResultRow("method", arm, "setting", "hash", seed, metric, value, 10, 1.0, {})


def test_interval_is_student_t_over_the_seeds():
    mean, half = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3.0
    assert half == pytest.approx(2.7764451 * math.sqrt(2.5 / 5), rel=1e-7)  # t_{.975, 4} s/√n
    assert math.isnan(mean_interval([7.0])[1])


def test_rows_round_trip_and_accumulate(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    assert read_rows(path) == []
    append_rows(path, [row("a", 0, 0.1)])
    append_rows(path, [row("a", 1, math.inf), row("b", 0, -2.0)])
    assert read_rows(path) == [row("a", 0, 0.1), row("a", 1, math.inf), row("b", 0, -2.0)]


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_rows(path, [row("a", 0, 0.1)])
    path.write_text(path.read_text() + '{"arm": "b"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_rows(path)


def test_table_shows_losing_and_missing_rows():
    rows = [row("ours", s, v) for s, v in enumerate((1.0, 2.0, 3.0))] + [row("peer", 0, 0.5)]
    lines = summary_table(rows, ["error", "other"], ["ours", "peer", "absent"], digits=2).splitlines()
    assert lines[2] == "| ours | 3 | 2.00 ± 2.48 | – |"
    assert lines[3] == "| peer | 1 | 0.50 | – |"
    assert lines[4] == "| absent | 0 | – | – |"
