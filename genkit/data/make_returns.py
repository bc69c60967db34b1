"""Makes the shipped table of market closes from an installed ``arch`` package, bit for bit.

Usage::

    pip install --no-deps arch==8.0.0
    python -m genkit.data.make_returns [OUT.csv]

Only the package's three compressed CSV files are read (its code is not imported). Rows are the dates on which the
S&P 500, the Nasdaq Composite and WTI crude oil all have a close, 1999-01-04 to 2018-12-28; the WTI series of the
package ends in January 2019, so the negative price of April 2020 is outside the table.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import math
import sys
from datetime import datetime
from pathlib import Path

from genkit.errors import MissingExtraError

__all__ = ["closes_table", "main"]

SOURCES = {"sp500": "Close", "nasdaq": "Close", "wti": "DCOILWTICO"}
SOURCE_VERSION = "8.0.0"


def _data_folder() -> Path:
    spec = importlib.util.find_spec("arch")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError(
            f"the table is made from the files of the package arch, which is not installed; "
            f"run `pip install --no-deps arch=={SOURCE_VERSION}`"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "data"


def _closes(path: Path, column: str) -> dict[str, float]:
    """ISO date → close; the source marks a missing close with a dot."""
    closes = {}
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row[column] not in ("", "."):
                closes[datetime.strptime(row["Date"], "%m/%d/%Y").date().isoformat()] = float(row[column])
    return closes


def closes_table() -> str:
    """The CSV text: header ``date,sp500,nasdaq,wti``, then one line per common date, closes to the cent."""
    folder = _data_folder()
    series = {name: _closes(folder / name / f"{name}.csv.gz", column) for name, column in SOURCES.items()}
    dates = sorted(set.intersection(*(set(closes) for closes in series.values())))
    lines = [",".join(["date", *SOURCES])]
    for date in dates:
        row = [closes[date] for closes in series.values()]
        if all(math.isfinite(close) for close in row):
            lines.append(",".join([date, *(f"{close:.2f}" for close in row)]))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the table to the given path, or over the shipped one."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "tables" / "market_returns.csv"
    text = closes_table()
    out.write_text(text, encoding="utf-8", newline="\n")
    print(f"{out}: {text.count(chr(10)) - 1} common dates, {len(text)} bytes")


if __name__ == "__main__":
    main()
