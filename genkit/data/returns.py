"""Joint daily returns of several assets: a shipped table, EWMA volatility without look-ahead, a reader for own files.

The shipped table holds daily closes of the S&P 500, the Nasdaq Composite and WTI crude oil on their 5012 common
dates, 1999-01-04 to 2018-12-28 (from the files of the package ``arch`` 8.0.0, NCSA licence; see ``make_returns.py``).
It ends before April 2020, when WTI settled below zero and log-returns stop existing.

Returns are log-returns in percent, r_t = 100 log(P_t / P_{t-1}). A time-ordered split of raw returns mostly measures
the change of volatility regime, so the default models z_t = r_t / σ_{t-1} with the RiskMetrics recursion::

    σ²_t = λ σ²_{t-1} + (1 - λ) r²_t,      λ = .94 for daily data

where the mean return is taken as zero. σ_{t-1} uses returns up to day t-1 only.

Reference: J.P. Morgan / Reuters, "RiskMetrics technical document", 4th ed. 1996, section 5.2.
"""

from __future__ import annotations

import csv
import difflib
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from genkit.errors import ConfigError, nearest

__all__ = ["MarketReturns", "PriceTable", "ewma_volatility", "log_returns", "market_closes", "read_price_table"]

_SHIPPED = Path(__file__).parent / "tables" / "market_returns.csv"
_MIN_TRAIN, _MIN_TEST = 100, 20
_MIDNIGHT = re.compile(r"[ T]00:00(:00(\.0+)?)?([+-]\d\d:\d\d|Z)?$")  # pandas writes a day as 2018-12-28 00:00:00
_MISSING = {"", ".", "-", "nan", "na", "n/a", "#n/a", "null", "none"}
_LARGEST_MEDIAN = 20.0  # percent a day: beyond any market, while index points and most prices lie above


@dataclass(frozen=True)
class PriceTable:
    """Daily values of several assets on common dates.

    Args:
        dates: strictly increasing, N of them.
        names: the d assets.
        values: float64 (N, d), prices or returns in percent.
        kind: ``"prices"`` or ``"returns"``: what ``values`` are.
    """

    dates: tuple[date, ...]
    names: tuple[str, ...]
    values: Tensor
    kind: str = "prices"

    def returns(self) -> tuple[tuple[date, ...], Tensor]:
        """The dates of the returns and the log-returns in percent: N-1 of them from prices, N from returns."""
        if self.kind == "returns":
            return self.dates, self.values
        return self.dates[1:], log_returns(self.values)


def log_returns(prices: Tensor) -> Tensor:
    """r_t = 100 log(P_t / P_{t-1}) in percent, float64 (N-1, d) from positive prices (N, d)."""
    if not bool((prices > 0).all()):
        raise ConfigError(f"log-returns need positive prices; {int((~(prices > 0)).sum())} values are not")
    return 100.0 * torch.diff(torch.log(prices.to(torch.float64)), dim=0)


def market_closes() -> PriceTable:
    """The shipped closes: names ``sp500``, ``nasdaq`` (index points), ``wti`` (US dollars a barrel), 5012 dates."""
    return read_price_table(_SHIPPED)


def ewma_volatility(returns: Tensor, decay: float = 0.94, warmup: int = 100) -> Tensor:
    """σ_{t-1} for every day t: the volatility that is known when day t opens.

    The recursion starts from the mean square of the first ``warmup`` returns and runs from there; rows up to
    ``warmup`` would have seen their own prefix and are NaN.

    Args:
        returns: (N, d) in percent.
        decay: λ in (0, 1).
        warmup: days that only initialise the recursion, 1 <= warmup < N.

    Returns:
        float64 (N, d), in percent a day; row t depends on returns before row t only.
    """
    if not 0.0 < decay < 1.0:
        raise ConfigError(f"decay must lie in (0, 1), got {decay!r}; RiskMetrics uses 0.94 for daily data")
    if not 1 <= warmup < len(returns):
        raise ConfigError(f"warmup must be at least 1 and below the {len(returns)} days of returns, got {warmup}")
    squares = returns.to(torch.float64).square()
    variance = squares[:warmup].mean(dim=0)
    known = torch.full_like(squares, math.nan)
    for day in range(warmup, len(squares)):
        known[day] = variance
        variance = decay * variance + (1.0 - decay) * squares[day]
    return known.sqrt()


class MarketReturns:
    r"""Joint daily returns as a map-style data set: ``data[LongTensor (b,)] -> {"sample": float32 (b, d)}``.

    Args:
        kind: ``"ewma"``: z_t = r_t / σ_{t-1}, in units of the day's volatility; ``"raw"``: r_t in percent.
        decay: λ of the EWMA recursion.
        split: ``"train"``, ``"test"`` (the last ``holdout`` share of the days, in time order) or ``"all"``.
        holdout: share of the days held out, in (0, 1).
        warmup: days that only initialise the volatility; they belong to neither split, whatever ``kind`` is.
        path: a CSV file of the user's own (see :func:`read_price_table`); None takes the shipped table.
        columns: the assets to use, in this order; None takes all.
        values: what the file holds: ``"prices"`` or ``"returns"`` (log-returns in percent). The shipped table holds
            prices.

    Attributes:
        names: the d assets.  dates: of this split's n days.
        returns: float64 (n, d), r_t in percent.  volatility: float64 (n, d), σ_{t-1} in percent.
        sample: float32 (n, d), what ``data[i]`` returns.
        history: float64 (N, d), all returns from the first on, and start: the row of this split's first day in it.

    Raises:
        ConfigError: an unknown option or column, a missing or damaged file, too few days.
    """

    def __init__(
        self,
        kind: str = "ewma",
        *,
        decay: float = 0.94,
        split: str = "train",
        holdout: float = 0.2,
        warmup: int = 100,
        path: str | Path | None = None,
        columns: Sequence[str] | None = None,
        values: str = "prices",
    ) -> None:
        _one_of("kind", kind, ("ewma", "raw"))
        _one_of("split", split, ("train", "test", "all"))
        if path is None and values == "returns":
            raise ConfigError(
                "the shipped table holds prices, got values='returns'; use values='prices' or give a path"
            )
        table = read_price_table(_SHIPPED if path is None else path, columns=columns, values=values)
        dates, history = table.returns()
        begin, end = _split_rows(len(history), split, holdout, warmup)
        known = ewma_volatility(history, decay, warmup)
        _check_volatility(known[warmup:], dates[warmup:], table.names)
        self.kind, self.split, self.names = kind, split, table.names
        self.dates, self.history, self.start = dates[begin:end], history, begin
        self.returns, self.volatility = history[begin:end], known[begin:end]
        self.sample = (self.returns / self.volatility if kind == "ewma" else self.returns).to(torch.float32)

    def __len__(self) -> int:
        return len(self.sample)

    def __getitem__(self, index: Tensor) -> dict[str, Tensor]:
        return {"sample": self.sample[index]}

    @property
    def scale(self) -> Tensor:
        """What turns samples into percent returns, float64 (n, d): σ_{t-1}, or ones for raw returns."""
        return self.volatility if self.kind == "ewma" else torch.ones_like(self.volatility)


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.{nearest(value, allowed)}")


def _split_rows(days: int, split: str, holdout: float, warmup: int) -> tuple[int, int]:
    """First and one-past-last row of a split; the held-out days are the last ones."""
    if not 0.0 < holdout < 1.0:
        raise ConfigError(f"holdout must be a share in (0, 1), got {holdout!r}")
    usable = days - warmup
    held = int(math.floor(usable * holdout))
    if warmup < 1 or usable - held < _MIN_TRAIN or held < _MIN_TEST:
        raise ConfigError(
            f"too few days: {days} returns less {warmup} of warm-up leave {max(usable - held, 0)} to train on and "
            f"{max(held, 0)} held out; at least {_MIN_TRAIN} and {_MIN_TEST} are needed (and warmup >= 1)"
        )
    cut = days - held
    return {"train": (warmup, cut), "test": (cut, days), "all": (warmup, days)}[split]


def _check_volatility(volatility: Tensor, dates: Sequence[date], names: Sequence[str]) -> None:
    bad = (~(volatility > 0)).nonzero()
    if len(bad):
        day, asset = (int(i) for i in bad[0])
        raise ConfigError(
            f"the volatility of {names[asset]!r} is zero on {dates[day]}: is the column constant? Leave it out"
        )


def read_price_table(
    path: str | Path,
    *,
    columns: Sequence[str] | None = None,
    date_column: str = "date",
    values: str = "prices",
) -> PriceTable:
    """Reads a CSV file with a header, one column of ISO dates (``2018-12-28``) and one column per asset.

    Args:
        path: the file, comma-separated UTF-8; ``~`` is the home folder.
        columns: assets to read, in this order; None reads every column but the dates. Names match exactly, or up to
            upper and lower case where only one column then fits.
        date_column: name of the column of dates, matched in the same way.
        values: ``"prices"`` (positive) or ``"returns"`` (log-returns in percent).

    Raises:
        ConfigError: the file or a column is missing (the nearest name is given), has no name or shares it, the file is
            not UTF-8 or not comma-separated, text where a number belongs, rows with missing or non-finite values
            (counted), prices that are not positive, prices read as returns, dates that do not increase, fewer than
            two rows.
    """
    _one_of("values", values, ("prices", "returns"))
    source = Path(path).expanduser()
    header, rows, lines = _read_rows(source)
    date_index = _column(header, date_column, source)
    columns = _assets(header, date_index, source) if columns is None else list(columns)
    picked = [_column(header, name, source) for name in columns]
    if len(set(picked)) < len(picked) or date_index in picked:
        raise ConfigError(f"columns={columns} name a column twice, or the dates; name each asset once")
    dates = _dates([row[date_index] for row in rows], lines, source)
    where = [f"{source}, line {line}: column" for line in lines]
    numbers = torch.tensor(
        [[_number(row[i], f"{at} {header[i]!r}") for i in picked] for row, at in zip(rows, where, strict=True)],
        dtype=torch.float64,
    )
    _check_values(numbers, dates, columns, values, source)
    return PriceTable(dates, tuple(columns), numbers, values)


def _read_rows(source: Path) -> tuple[list[str], list[list[str]], list[int]]:
    """Header, rows of data and the line of the file on which each of them ends."""
    reader = csv.reader(io.StringIO(_read_text(source), newline=""))
    try:
        numbered = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise ConfigError(f"{source}, line {reader.line_num}: not a CSV file ({error})") from error
    lines, rows = [line for line, _ in numbered], [row for _, row in numbered]
    _check_separator(rows[0] if rows else [], source)
    if len(rows) < 3:
        raise ConfigError(f"{source} has {max(len(rows) - 1, 0)} rows of data below its header; at least 2 are needed")
    header = [name.strip() for name in rows[0]]
    ragged = [i for i, row in enumerate(rows) if len(row) != len(header)]
    if ragged:
        raise ConfigError(
            f"{source}: {len(ragged)} rows do not have the header's {len(header)} fields (first: line "
            f"{lines[ragged[0]]}, {','.join(rows[ragged[0]])!r}); fields are separated by commas: leave out a comma at "
            f"the end of a line and between thousands"
        )
    return header, rows[1:], lines[1:]


def _read_text(source: Path) -> str:
    if not source.is_file():
        # of the names without their common ending, which would make any two of them look alike
        siblings = {p.stem: p.name for p in source.parent.glob("*.csv")} if source.parent.is_dir() else {}
        close = difflib.get_close_matches(source.stem, siblings, n=1, cutoff=0.75)
        hint = f" Did you mean {siblings[close[0]]!r}?" if close else ""
        raise ConfigError(f"no file {source}.{hint} Give the path of a CSV file")
    try:
        text = source.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{source} cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{source} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    if "\0" in text:  # UTF-16 without its mark
        raise ConfigError(f"{source} is not UTF-8 text (it holds zero bytes); save it as UTF-8")
    return text


def _check_separator(header: Sequence[str], source: Path) -> None:
    found = next((mark for mark in ";\t|" if len(header) == 1 and mark in header[0]), None)
    if found:
        shown = "tabs" if found == "\t" else f'"{found}"'
        raise ConfigError(
            f'{source}: fields are separated by {shown}; expected ",": save it with commas, and decimals with points'
        )


def _assets(header: Sequence[str], date_index: int, source: Path) -> list[str]:
    """The names of all columns but the dates; an index that an export left without a name is no asset."""
    names = [name for i, name in enumerate(header) if i != date_index]
    if not names:
        raise ConfigError(f"{source} has no column beside the dates; at least one asset is needed")
    unnamed = [i for i, name in enumerate(header) if not name or name.startswith("Unnamed:")]
    if unnamed:
        raise ConfigError(
            f"{source}: column {unnamed[0] + 1} has no name (the row numbers of an export, or a comma at the end of "
            f"each line?); drop it, name it, or choose columns={[n for n in names if n]}"
        )
    return names


def _column(header: Sequence[str], name: str, source: Path) -> int:
    """The column of that very name, or the only one that has it up to upper and lower case."""
    exact = [i for i, title in enumerate(header) if title == name]
    found = exact or [i for i, title in enumerate(header) if title.lower() == name.lower()]
    if len(found) > 1:
        shown = ", ".join(f"{header[i]!r} (column {i + 1})" for i in found)
        raise ConfigError(f"{source} has {len(found)} columns for {name!r}: {shown}; rename them, or give one exactly")
    if not found:
        index = " Name the column without a name if it holds that." if "" in header else ""
        shown = ", ".join(title or "''" for title in header)
        raise ConfigError(f"{source} has no column {name!r}; it has {shown}.{nearest(name, header)}{index}")
    return found[0]


def _number(text: str, where: str) -> float:
    if text.strip().lower() in _MISSING:  # counted with the rows that are not finite
        return math.nan
    try:
        return float(text)
    except ValueError:
        hint = "write numbers without thousands separators, such as 1234.5" if "," in text else "leave the column out"
        raise ConfigError(f"{where} holds {text!r}, expected a number; {hint}") from None


def _dates(texts: Sequence[str], lines: Sequence[int], source: Path) -> tuple[date, ...]:
    dates: list[date] = []
    for line, text in zip(lines, texts, strict=True):
        try:
            dates.append(date.fromisoformat(_MIDNIGHT.sub("", text.strip())))
        except ValueError:
            raise ConfigError(f"{source}, line {line}: {text!r} is not an ISO date such as 2018-12-28") from None
        if len(dates) > 1 and dates[-1] <= dates[-2]:
            raise ConfigError(
                f"{source}, line {line}: {dates[-1]} comes after {dates[-2]}; dates must increase strictly: "
                f"sort the rows and drop repeated days"
            )
    return tuple(dates)


def _check_values(numbers: Tensor, dates: Sequence[date], names: Sequence[str], values: str, source: Path) -> None:
    bad = ~torch.isfinite(numbers)
    if bool(bad.any()):
        day, asset = (int(i) for i in bad.nonzero()[0])
        raise ConfigError(
            f"{source}: {int(bad.any(dim=1).sum())} of {len(numbers)} rows hold a missing or non-finite value (first: "
            f"column {names[asset]!r} on {dates[day]}); keep the dates on which every column has a number"
        )
    (_check_prices if values == "prices" else _check_returns)(numbers, dates, names, source)


def _check_prices(numbers: Tensor, dates: Sequence[date], names: Sequence[str], source: Path) -> None:
    wrong = (numbers <= 0).nonzero()
    if len(wrong):
        day, asset = (int(i) for i in wrong[0])
        raise ConfigError(
            f"{source}: {len(wrong)} prices are not positive (first: {names[asset]} = {float(numbers[day, asset]):g} "
            f"on {dates[day]}), so they have no log-return; cut the period, or pass returns with values='returns'"
        )


def _check_returns(numbers: Tensor, dates: Sequence[date], names: Sequence[str], source: Path) -> None:
    medians = numbers.median(dim=0).values
    for asset in ((numbers > 0).all(dim=0) & (medians > _LARGEST_MEDIAN)).nonzero().flatten().tolist():
        raise ConfigError(
            f"{source}: {names[asset]!r} is positive on all {len(dates)} days with median {float(medians[asset]):g}, "
            f"which log-returns in percent cannot be; set values: prices, or leave the column out"
        )
