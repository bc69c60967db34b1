"""Times the built-in log-signature beside pysiglib and iisignature, and Kanter's draws beside scipy's.

Batch 4096, float32, one thread, d = 2. ``clock_path``: paths (s, L_s) on one shared time grid, whose tables are made
once outside the timing, as pysiglib's and iisignature's preparation is; the peers get the stacked path ready-made.
``general_path``: any path (Brownian here). iisignature has no Lyndon words: its bracket basis costs the same.

Run: ``python benchmarks/logsignature.py [--repeats 25]`` (about 20 s on one core).
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _bench import bench_line, interleaved, one_thread, ratio

from genkit.data.stable import log_kanter
from genkit.pipelines.heavy_tailed_flow.logsignature import clock_logsignature, logsignature

BATCH = 4096
GOALS = {"clock_path_d3_p65_vs_pysiglib": "<=0.6"}


def peers(path: torch.Tensor, depth: int) -> dict[str, Callable[[], Any]]:
    """The other libraries' functions on one batch of paths, prepared; a missing one is left out."""
    found: dict[str, Callable[[], Any]] = {}
    if importlib.util.find_spec("pysiglib"):
        import pysiglib
        from pysiglib import torch_api

        pysiglib.prepare_log_sig(path.shape[2], depth, method=1)
        found["pysiglib"] = lambda: torch_api.log_sig(path, depth, method=1)
    if importlib.util.find_spec("iisignature"):
        import iisignature

        prepared, array = iisignature.prepare(path.shape[2], depth), path.numpy()
        found["iisignature"] = lambda: iisignature.logsig(array, prepared)
    return found


def measure(name: str, ours: Callable[[], torch.Tensor], path: torch.Tensor, depth: int, repeats: int) -> list[str]:
    """BENCH lines of one setting against every peer, after a check that the numbers agree."""
    others = peers(path, depth)
    if "pysiglib" in others:
        reference = others["pysiglib"]()
        error = float((ours() - reference).abs().max() / reference.abs().max())
        if not error < 1e-4:
            raise SystemExit(f"{name}: the built-in log-signature differs from pysiglib's by {error:.1e}, relatively")
    seconds = interleaved({"builtin": ours, **others}, repeats)
    for library, values in seconds.items():
        print(f"{name} {library}: {1e3 * float(np.median(values)):.3f} ms")
    results = {f"{name}_vs_{peer}": ratio(seconds["builtin"], seconds[peer]) for peer in others}
    return [bench_line(key, value, GOALS.get(key)) for key, value in results.items()]


def clock_paths(points: int, depth: int, repeats: int) -> list[str]:
    times = torch.linspace(0, 1, points)
    values = torch.rand(BATCH, points, generator=torch.Generator().manual_seed(0)).cumsum(1).log1p()
    path = torch.stack((times.expand_as(values), values), dim=-1).contiguous()
    name = f"clock_path_d{depth}_p{points}"
    return measure(name, lambda: clock_logsignature(times, values, depth), path, depth, repeats)


def general_paths(points: int, depth: int, repeats: int) -> list[str]:
    noise = torch.randn(BATCH, points, 2, generator=torch.Generator().manual_seed(0))
    path = noise.cumsum(1) / points**0.5
    return measure(f"general_path_d{depth}_p{points}", lambda: logsignature(path, depth), path, depth, repeats)


def stable_draws(repeats: int) -> list[str]:
    """Totally skewed 0.75-stable draws for 1024 clock paths of 16 cells, random numbers included on both sides."""
    from scipy import stats

    count, generator, random = 1024 * 16, torch.Generator().manual_seed(0), np.random.default_rng(0)

    def kanter() -> torch.Tensor:
        uniform = torch.rand(count, generator=generator, dtype=torch.float64).clamp_(min=2.0**-53)
        exponential = torch.empty(count, dtype=torch.float64).exponential_(generator=generator)
        return log_kanter(uniform, exponential, 1.5).exp_()

    def scipy_stable() -> np.ndarray:
        return stats.levy_stable.rvs(
            0.75, 1.0, scale=np.cos(np.pi * 0.375) ** (1 / 0.75), size=count, random_state=random
        )

    seconds = interleaved({"kanter": kanter, "scipy": scipy_stable}, repeats, warmup=1)
    for name, values in seconds.items():
        print(f"stable draw {name}: {1e9 * float(np.median(values)) / count:.0f} ns")
    return [bench_line("speedup_kanter_vs_scipy", ratio(seconds["scipy"], seconds["kanter"]), None)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=25, help="interleaved repeats of each setting")
    repeats = parser.parse_args().repeats
    one_thread()
    for library in ("pysiglib", "iisignature"):
        if not importlib.util.find_spec(library):
            print(f"SKIP {library}: not installed")
    lines = []
    for points in (17, 65):
        for depth in (3, 4, 5):
            lines += clock_paths(points, depth, repeats) + general_paths(points, depth, repeats)
    lines += stable_draws(repeats)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
