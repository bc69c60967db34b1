"""What the benchmark scripts share: interleaved timing, and the ``BENCH`` line.

A ratio is the median over repeats of (genkit's time / the peer's time), both measured in the same repeat, so that a
machine that is busy for a while slows both. ``low`` and ``high`` are the quartiles of the repeats.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Ratio", "bench_line", "info_line", "interleaved", "keep_memory", "one_thread", "ratio"]


@dataclass(frozen=True)
class Ratio:
    """A measured ratio: median and quartiles over ``n`` repeats."""

    median: float
    low: float
    high: float
    n: int


def one_thread() -> None:
    """One thread for this process (overridable with ``OMP_NUM_THREADS``): two threads on a busy core lose 10-100x."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def keep_memory() -> None:
    """Lets glibc keep freed memory for reuse.

    By default it gives large blocks back to the system and faults them in again, at a cost that depends on the order
    of all allocations (a bare forward pass may take 20 % more or less); then that is what a benchmark measures.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def interleaved(functions: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of every function in every repeat; within a repeat they run one after the other, the order turning."""
    names = list(functions)
    for name in names:
        for _ in range(warmup):
            functions[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            start = time.perf_counter()
            functions[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(ours: Sequence[float], peers: Sequence[float], per_call: float = 1.0) -> Ratio:
    """Median and quartiles of ours / (per_call · peers), repeat by repeat."""
    values = sorted(a / (per_call * b) for a, b in zip(ours, peers, strict=True))
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return Ratio(statistics.median(values), low, high, len(values))


def bench_line(name: str, measured: Ratio, goal: str | None = "<=1.05") -> str:
    """``BENCH name=… ratio=… goal=… low=… high=… n=…``; without a goal the field is left out."""
    wanted = f" goal={goal}" if goal else ""
    return (
        f"BENCH name={name} ratio={measured.median:.4f}{wanted} "
        f"low={measured.low:.4f} high={measured.high:.4f} n={measured.n}"
    )


def info_line(name: str, measured: Ratio, note: str) -> str:
    """A ratio outside the conditions that the goals are for."""
    spread = f"low={measured.low:.4f} high={measured.high:.4f} n={measured.n}"
    return f"INFO name={name} ratio={measured.median:.4f} {spread} {note}"
