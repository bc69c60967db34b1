"""Every method's main job on what ships with genkit: one row of measured numbers each, and a page with the pictures."""

from __future__ import annotations

import html
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from genkit.errors import ConfigError, GenkitError, nearest
from genkit.registry import method_module, method_names

__all__ = ["DemoRow", "FailedDemo", "demo_table", "run_demos", "write_index"]


@dataclass(frozen=True)
class DemoRow:
    """What a method's demo measured.

    Args:
        name: of the method.
        measured: what the numbers are, with n and the baseline's name.
        value: the method's number.
        baseline: the baseline's number, in the same unit.
        ratio: value ÷ baseline, or what ``measured`` says it is.
        seconds: wall time; filled in by `run_demos` when 0.
        pictures: files below the demo's output folder.
    """

    name: str
    measured: str
    value: float
    baseline: float
    ratio: float
    seconds: float = 0.0
    pictures: Sequence[Path] = ()


@dataclass(frozen=True)
class FailedDemo:
    """A demo that raised, and its message."""

    name: str
    message: str
    seconds: float


def run_demos(out: Path, only: Sequence[str] = (), progress: bool = True) -> list[DemoRow | FailedDemo]:
    """Run the demos of the installed methods (or of ``only``); one that fails does not hide the others."""
    from tqdm import tqdm

    names = list(only) or method_names()
    for name in names:
        if name not in method_names():
            raise ConfigError(f"no demo {name!r}; expected {', '.join(method_names())}.{nearest(name, method_names())}")
    out.mkdir(parents=True, exist_ok=True)
    return [_run(name, out / name, progress) for name in tqdm(names, desc="demos", disable=not progress)]


def _run(name: str, out: Path, progress: bool) -> DemoRow | FailedDemo:
    start = time.perf_counter()
    try:
        out.mkdir(exist_ok=True)
        demo: Callable[..., DemoRow] = method_module(name, "demo").demo
        row = demo(out, progress)
    except GenkitError as error:
        return FailedDemo(name, str(error), time.perf_counter() - start)
    except Exception as error:  # the other methods still have something to show
        traceback.print_exc(file=sys.stderr)
        return FailedDemo(name, f"{type(error).__name__}: {error}", time.perf_counter() - start)
    return replace(row, seconds=row.seconds or time.perf_counter() - start)


def demo_table(rows: Sequence[DemoRow | FailedDemo]) -> str:
    """The rows as aligned text."""
    lines = [("method", "value", "baseline", "ratio", "seconds", "measured")]
    for row in rows:
        if isinstance(row, FailedDemo):
            lines.append((row.name, "FAILED", "", "", f"{row.seconds:.0f}", row.message))
        else:
            numbers = (f"{row.value:.4g}", f"{row.baseline:.4g}", f"{row.ratio:.3g}", f"{row.seconds:.0f}")
            lines.append((row.name, *numbers, row.measured))
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[5]]) for line in lines
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>genkit demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: .3rem .8rem; text-align: left; border-bottom: 1px solid #ccc; }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums; }} img {{ max-width: 100%; }}
.failed {{ color: #a00; }}
</style></head><body>
<h1>genkit demo</h1>
<p>Toy scale: small networks and data on one machine, each number measured in this run.</p>
<table><thead><tr><th>method</th><th>value</th><th>baseline</th><th>ratio</th><th>seconds</th><th>measured</th></tr></thead>
<tbody>
{rows}
</tbody></table>
{pictures}
</body></html>
"""


def write_index(rows: Sequence[DemoRow | FailedDemo], out: Path) -> Path:
    """``index.html`` in ``out``: opens from disk, every text escaped, pictures by relative address."""
    page = _PAGE.format(rows="\n".join(map(_html_row, rows)), pictures="\n".join(_html_pictures(r, out) for r in rows))
    path = out / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


def _html_row(row: DemoRow | FailedDemo) -> str:
    if isinstance(row, FailedDemo):
        name, message = html.escape(row.name), html.escape(row.message)
        rest = f'<td colspan="3">failed</td><td>{row.seconds:.0f}</td><td>{message}</td>'
        return f'<tr class="failed"><td>{name}</td>{rest}</tr>'
    numbers = (f"{row.value:.4g}", f"{row.baseline:.4g}", f"{row.ratio:.3g}", f"{row.seconds:.0f}")
    cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
    return f"<tr><td>{html.escape(row.name)}</td>{cells}<td>{html.escape(row.measured)}</td></tr>"


def _html_pictures(row: DemoRow | FailedDemo, out: Path) -> str:
    pictures = () if isinstance(row, FailedDemo) else row.pictures
    parts = [f"<h2>{html.escape(row.name)}</h2>"] if pictures else []
    for picture in pictures:
        address = quote(Path(os.path.relpath(picture, out)).as_posix())
        alt = html.escape(f"{row.name}: {Path(picture).stem.replace('_', ' ')}", quote=True)
        parts.append(f'<p><img src="{address}" alt="{alt}"></p>')
    return "\n".join(parts)
