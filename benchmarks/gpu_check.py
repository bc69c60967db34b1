"""Checks for a CUDA device: the same numbers as on the CPU, and what the compiled and low-precision variants cost.

    python benchmarks/gpu_check.py

Each part prints ``OK``, ``FAILED`` (with the difference) or ``SKIPPED`` (with what is missing), and BENCH lines
last. It ends in at most 8 minutes. Without a CUDA device every part is skipped by name and the exit status is 0; a
failed part gives 1.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from _bench import bench_line, interleaved, ratio

from genkit.models import ConditionalMLP
from genkit.pipelines.heavy_tailed_flow import ClockDenoiser, HeavyTailedFlowPipeline, StableClock, StudentTClock
from genkit.samplers import draw_keys, rollout
from genkit.schedulers import FlowScheduler, VPScheduler

PARTS: list[Callable[[], Iterator[str]]] = []


def part(function: Callable[[], Iterator[str]]) -> Callable[[], Iterator[str]]:
    """Registers a part; it yields BENCH lines and raises AssertionError where a number is wrong."""
    PARTS.append(function)
    return function


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest absolute difference, on the CPU in float64."""
    return float((a.detach().cpu().double() - b.detach().cpu().double()).abs().max())


def require(value: float, bound: float, what: str) -> None:
    """Fails with the number and its bound."""
    if not value <= bound:
        raise AssertionError(f"{what}: {value:.3g}, expected at most {bound:.3g}")


def synchronised(function: Callable[[], object]) -> Callable[[], None]:
    """Waits for the device, so that a timing covers the work and not its launch."""

    def call() -> None:
        function()
        torch.cuda.synchronize()

    return call


@part
def keyed_noise() -> Iterator[str]:
    """Words and normals are the CPU's, bit for bit."""
    keys = draw_keys(torch.Generator().manual_seed(0), 4096)
    there = keys.to("cuda")
    assert torch.equal(keys.words(64), there.words(64).cpu()), "Philox words differ from the CPU's"
    assert torch.equal(keys.normal((64,)), there.normal((64,)).cpu()), "normals differ from the CPU's"
    assert torch.equal(keys.uniform((16,)), there.uniform((16,)).cpu()), "uniforms differ from the CPU's"
    yield from ()


class _Denoiser(torch.nn.Module):
    prediction_type = "v_prediction"

    def __init__(self, channels: int, width: int, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = ConditionalMLP(channels, width=width, blocks=blocks)
        torch.nn.init.normal_(self.network.output.weight, std=0.02)

    def forward(self, x: torch.Tensor, t: torch.Tensor, cond: object = None) -> torch.Tensor:
        return self.network(x, t)


@part
def walks() -> Iterator[str]:
    """Every solver gives the CPU's samples within float32 rounding; a stochastic one reads the same noise."""
    network, scheduler = _Denoiser(16, 64, 2), VPScheduler("cosine")
    there = copy.deepcopy(network).cuda()
    for solver in ("euler", "heun", "midpoint", "dpmpp_2s", "dpmpp_2m", "unipc", "ancestral"):
        x = draw_keys(torch.Generator().manual_seed(1), 64).normal((16,))
        options = {"num_inference_steps": 20, "solver": solver}
        with torch.no_grad():
            here = rollout(network, scheduler, x, generator=torch.Generator().manual_seed(0), **options).sample
            away = rollout(there, scheduler, x.cuda(), generator=torch.Generator().manual_seed(0), **options).sample
        require(difference(here, away), 2e-3, f"{solver} on the device")
    yield from ()


@part
def sampler_overhead() -> Iterator[str]:
    """Wall time over the bare forward passes, eager and compiled, at a batch whose forward takes milliseconds."""
    network, scheduler = _Denoiser(256, 4096, 8).cuda(), VPScheduler("cosine")
    x, t, steps = torch.randn(16384, 256, device="cuda"), torch.ones(16384, device="cuda"), 20

    def bare() -> None:
        for _ in range(steps):
            network(x, t)

    def walk(compile: bool) -> Callable[[], object]:
        return lambda: rollout(network, scheduler, x, num_inference_steps=steps, generator=seeded(), compile=compile)

    with torch.no_grad():
        timed = {"bare": bare, "eager": walk(False), "compiled": walk(True)}
        seconds = interleaved({name: synchronised(f) for name, f in timed.items()}, repeats=10, warmup=3)
    for name in ("eager", "compiled"):
        goal = "<=1.05" if name == "eager" else None
        yield bench_line(f"cuda_rollout_euler_{name}", ratio(seconds[name], seconds["bare"]), goal)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@part
def low_precision() -> Iterator[str]:
    """A bfloat16 network in a float32 walk stays near the float32 one, and what it gains in time."""
    network, scheduler = _Denoiser(256, 2048, 6).cuda(), VPScheduler("cosine")
    half = copy.deepcopy(network).to(torch.bfloat16)
    x = torch.randn(8192, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(0))

    def walk(net: torch.nn.Module, start: torch.Tensor) -> torch.Tensor:
        return rollout(net, scheduler, start, num_inference_steps=20, generator=seeded()).sample

    with torch.no_grad():
        full, low = walk(network, x), walk(half, x.to(torch.bfloat16))
        require(difference(full, low) / float(full.abs().max()), 0.05, "bfloat16 walk, relative to the largest value")
        timed = {"full": lambda: walk(network, x), "low": lambda: walk(half, x.to(torch.bfloat16))}
        seconds = interleaved({name: synchronised(f) for name, f in timed.items()}, repeats=10)
    yield bench_line("speedup_cuda_bf16_walk", ratio(seconds["full"], seconds["low"]), None)


@part
def heavy_tailed_flow() -> Iterator[str]:
    """Clocks, features and samples of the pipeline are the CPU's, and the cost of the features beside a walk."""
    keys = draw_keys(seeded(), 2048)
    for clock in (StudentTClock(4.0), StableClock(1.5)):
        here, there = clock.path(keys, 16), clock.path(keys.to("cuda"), 16)
        require(difference(here.log1p(), there.log1p()), 1e-9, f"{clock.law} clock paths, log(1 + T)")
        denoiser = ClockDenoiser(3, clock.to_dict(), width=64, blocks=3)
        features = copy.deepcopy(denoiser.features).cuda()
        require(difference(denoiser.features(here), features(there)), 1e-5, f"{clock.law} features")
    denoiser.fit(torch.randn(4000, 3, generator=seeded()), "whiten")
    pipe = HeavyTailedFlowPipeline(denoiser, FlowScheduler())
    pipe.set_progress_bar_config(disable=True)
    here = pipe(512, 10, generator=seeded()).samples
    pipe.to("cuda")
    there = pipe(512, 10, generator=seeded()).samples
    require(difference(here, there) / float(here.abs().max()), 1e-4, "pipeline samples, relative to the largest")
    path = StableClock(1.5).path(draw_keys(seeded(), 65536, "cuda"), 16)
    big = draw_keys(seeded(), 65536, "cuda").normal((3,))
    cond = {"clock": path[:, -1], "features": pipe.denoiser.features(path)}
    t = torch.ones(65536, device="cuda")

    def forwards() -> None:
        for _ in range(20):
            pipe.denoiser(big, t, cond)

    with torch.no_grad():
        timed = {"features": lambda: pipe.denoiser.features(path), "walk": forwards}
        seconds = interleaved({name: synchronised(f) for name, f in timed.items()}, repeats=10)
    yield bench_line("cuda_clock_features_vs_20_forwards", ratio(seconds["features"], seconds["walk"]), None)


@contextmanager
def timed(name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    print(f"   {name}: {time.perf_counter() - start:.1f} s")


def main() -> int:
    """Runs all parts; 1 when one failed."""
    lines, failed = [], 0
    for function in PARTS:
        name = function.__name__
        if not torch.cuda.is_available():
            print(f"SKIPPED {name}: no CUDA device")
            continue
        try:
            with timed(name):
                lines += list(function())
            print(f"OK {name}")
        except Exception as error:
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {error}")
    print("\n".join(lines))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
