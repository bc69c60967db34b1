"""Runs every benchmark, one after the other, and gathers their ``BENCH`` lines into one table.

Each script prints lines such as ``BENCH name=rollout_euler ratio=1.02 goal=<=1.05 low=1.00 high=1.04 n=15``: genkit's
time or memory divided by the peer's, except names that start with ``speedup_``. Run it on an otherwise idle machine::

    make bench
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["bench_fields", "main", "verdict"]

HERE = Path(__file__).resolve().parent
ELSEWHERE = {"run_all.py", "gpu_check.py"}  # gpu_check needs a CUDA device and is run by hand
COLUMNS = ("name", "ratio", "goal", "low", "high", "n")


def bench_fields(line: str) -> dict[str, str]:
    """The ``key=value`` pairs of a ``BENCH`` line; an empty mapping for any other line."""
    if not line.startswith("BENCH "):
        return {}
    return dict(word.split("=", 1) for word in line.split()[1:] if "=" in word)


def verdict(fields: dict[str, str]) -> str:
    """``met`` or ``missed`` by the ratio and its goal (``<=1.05``, ``>=2``); ``reported`` where there is no goal."""
    goal = fields.get("goal", "")
    if goal[:2] not in ("<=", ">="):
        return "reported"
    ratio, bound = float(fields["ratio"]), float(goal[2:])
    return "met" if (ratio <= bound if goal.startswith("<=") else ratio >= bound) else "missed"


def run(script: Path) -> tuple[list[dict[str, str]], int]:
    """Runs one benchmark, passing its output through; its BENCH rows and exit status."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    rows: dict[str, dict[str, str]] = {}  # by name: a script may print a line when it has it, and all at its end
    for line in process.stdout:
        print(line, end="", flush=True)
        fields = bench_fields(line)
        if fields:
            rows[fields["name"]] = {"script": script.name, **fields}
    return list(rows.values()), process.wait()


def table(rows: list[dict[str, str]]) -> str:
    """A Markdown table of BENCH rows."""
    lines = ["| script | " + " | ".join(COLUMNS) + " | verdict |", "|---" * (len(COLUMNS) + 2) + "|"]
    for row in rows:
        cells = [row["script"], *(row.get(column, "") for column in COLUMNS), verdict(row)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs the scripts and writes the table; 1 when a script failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench.md"), help="where the table goes")
    parser.add_argument("--only", nargs="*", default=None, help="names of scripts without .py")
    args = parser.parse_args()
    scripts = [s for s in sorted(HERE.glob("*.py")) if s.name not in ELSEWHERE and not s.name.startswith("_")]
    scripts = [s for s in scripts if args.only is None or s.stem in args.only]
    rows, failed = [], []
    for script in scripts:
        print(f"== {script.name}", flush=True)
        found, status = run(script)
        rows += found
        failed += [script.name] * (status != 0)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(table(rows), encoding="utf-8")
    print(f"{len(rows)} ratios written to {args.out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
