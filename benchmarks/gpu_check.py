"""Checks for a CUDA device: the same numbers as on the CPU, and what the compiled and low-precision variants cost.

    python benchmarks/gpu_check.py

Each part prints ``OK``, ``FAILED`` (with the difference) or ``SKIPPED`` (with what is missing), and BENCH lines
last. It ends in at most 8 minutes. Without a CUDA device every part is skipped by name and the exit status is 0; a
failed part gives 1.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from _bench import bench_line, interleaved, ratio
from _blocks import (
    bare_passes,
    batch_keys,
    block_objective,
    loss_and_gradient,
    random_batch,
    random_lm,
    traced,
)

from genkit.models import ConditionalMLP
from genkit.models.attention import register_xformers
from genkit.models.causal_lm import CachedCausalLM
from genkit.pipelines.heavy_tailed_flow import ClockDenoiser, HeavyTailedFlowPipeline, StableClock, StudentTClock
from genkit.samplers import draw_keys, rollout
from genkit.samplers.blockwise import decode_blocks
from genkit.samplers.strategies import make_strategy
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


# --- block diffusion: the helpers take the device, so that a CPU can try them at small sizes --------------------------


def decoded(model: Any, prompts: torch.Tensor, valid: torch.Tensor, **options: Any) -> Any:
    """``decode_blocks`` where the model is."""
    device, mask = next(model.parameters()).device, model.config.vocab_size - 1
    where = {"mask_token_id": mask, "generator": seeded(), **options}
    return decode_blocks(model, prompts.to(device), valid.to(device), **where)


def compare_decoding(device: str) -> None:
    """Ragged prompts: every strategy writes the CPU's tokens in as many calls, float64 so that no tie is broken."""
    model = random_lm(64, 2, 4, 61, key_heads=2, std=0.3, positions=160, dtype=torch.float64)
    there = copy.deepcopy(model).to(device)
    prompts = torch.randint(2, 60, (4, 12), generator=seeded())
    valid = torch.arange(12) >= torch.tensor([[0], [3], [7], [11]])
    strategies = [
        ("sequential", {}),
        ("fixed_steps", {"steps": 3}),
        ("threshold", {"threshold": 0.5}),
        ("entropy_bound", {"bound": 1.0}),
        ("margin", {"threshold": 0.2}),
        ("random", {"steps": 4, "temperature": 1.0}),
    ]
    for name, settings in strategies:
        for length in (1, 8):
            options = {"strategy": make_strategy(name, **settings), "block_length": length, "max_new_tokens": 19}
            options["eos_token_id"] = 1
            here, away = (decoded(m, prompts, valid, **options) for m in (model, there))
            same = torch.equal(here.tokens, away.tokens.cpu()) and torch.equal(here.calls, away.calls.cpu())
            assert same, f"{name}, block length {length}: tokens or calls differ from the CPU's"


@part
def block_decoding() -> Iterator[str]:
    """Blocks decoded on the device are the CPU's, and float32 logits of a cached pass are near."""
    compare_decoding("cuda")
    model = random_lm(256, 4, 4, 512, std=0.1)
    prompts, block = (torch.randint(2, 500, shape, generator=seeded()) for shape in ((2, 64), (2, 8)))
    logits = {}
    for device in ("cpu", "cuda"):
        adapter = CachedCausalLM(copy.deepcopy(model).to(device))
        with torch.no_grad():
            _, cache = adapter.prefill(prompts.to(device), torch.ones_like(prompts, dtype=torch.bool, device=device))
            logits[device] = adapter.denoise(block.to(device), cache)
    scale = float(logits["cpu"].abs().max())
    require(difference(logits["cpu"], logits["cuda"]) / scale, 1e-3, "logits of a cached pass, relative")
    yield from ()


def compare_losses(device: str, length: int = 96) -> None:
    """Loss and gradient of the one-pass objective in float32, with its options and with padded rows."""
    cases: list[dict[str, Any]] = [
        {},
        {"complementary": True},
        {"random_offset": True},
        {"ar_weight": 0.0, "shift": False, "clean_rule": "block"},
        {"block_length": 1},
        {"block_length": length},
    ]
    for options in cases:
        model = random_lm(64, 2, 4, 61, key_heads=2, std=0.2).train()
        results = {}
        for where in ("cpu", device):
            copied = copy.deepcopy(model).to(where)
            batch = random_batch(copied, 4, length, where)
            document = torch.zeros_like(batch["tokens"])
            document[1, length // 2 :], document[2, length // 3 :] = -1, 1  # one row padded, one of two documents
            batch["document"] = document
            results[where] = loss_and_gradient(block_objective(copied, **options), batch, batch_keys(4, where))
        (loss, gradient), (other, others) = results["cpu"], results[device]
        require(difference(loss, other), 1e-4, f"loss with {options}")
        require(relative(others, gradient), 1e-3, f"gradient with {options}, relative")


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    return float((a - b).norm() / b.norm())


@part
def block_training_losses() -> Iterator[str]:
    """The objective's loss and gradient are the CPU's within float32 rounding."""
    compare_losses("cuda")
    yield from ()


def backend_result(backend: str, device: str = "cuda", **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient at L = 512 under an attention backend."""
    model = random_lm(256, 2, 4, 512, key_heads=2, std=0.1, device=device).train()
    model.set_attn_implementation(backend)
    batch = random_batch(model, 4, 512, device)
    return loss_and_gradient(block_objective(model, **options), batch, batch_keys(4, device))


@part
def block_attention_backends() -> Iterator[str]:
    """FlexAttention (and xformers) give sdpa's loss and gradient at L = 512, and what they gain in time."""
    backends = ["flex_attention"]
    if importlib.util.find_spec("xformers") is None:
        print("   SKIPPED xformers: not installed")
    else:
        backends.append(register_xformers())
    loss, gradient = backend_result("sdpa")
    wrong = relative(backend_result("sdpa", block_length=16)[1], gradient)
    assert wrong > 0.05, f"another mask moves the gradient by {wrong:.3g} only, so this comparison would show nothing"
    for backend in backends:
        other, others = backend_result(backend)
        require(difference(other, loss), 1e-3, f"{backend}: loss")
        require(relative(others, gradient), 1e-2, f"{backend}: gradient, relative")
    yield from backend_speed(["sdpa", *backends])


def moving_steps(backend: str, length: int, device: str) -> Callable[[], object]:
    """bf16 steps (forward and backward) whose grid moves from step to step, as in training."""
    model = random_lm(512, 4, 8, 512, key_heads=4, device=device, dtype=torch.bfloat16).train()
    model.set_attn_implementation(backend)
    objective, numbers = block_objective(model, 32, random_offset=True), itertools.count()
    batch, keys = random_batch(model, 2, length, device), batch_keys(2, device)
    return lambda: loss_and_gradient(objective, batch, keys.at(step=next(numbers)))


def backend_speed(backends: list[str], length: int = 4096, device: str = "cuda") -> Iterator[str]:
    """The step time of each backend beside sdpa; a step that takes far longer than the others was compiled again."""
    steps = {backend: synchronised(moving_steps(backend, length, device)) for backend in backends}
    seconds = interleaved(steps, repeats=8, warmup=2)
    for backend in backends[1:]:
        slowest, usual = max(seconds[backend]), sorted(seconds[backend])[len(seconds[backend]) // 2]
        if slowest > 5 * usual + 1.0:
            print(f"   INFO {backend}: one step took {slowest:.1f} s, the usual {usual:.3f} s: it was compiled again")
        name = backend.removeprefix("genkit_").removesuffix("_attention")
        yield bench_line(f"speedup_cuda_{name}_vs_sdpa_{length}", ratio(seconds["sdpa"], seconds[backend]), None)


#: Width, layers, heads, key-value heads, inner width, vocabulary: Qwen2.5-1.5B's.
_LONG = (1536, 28, 12, 2, 8960, 151_936)


def enable_checkpointing(model: Any) -> None:
    """The layers' activations are computed again in the backward pass; renamed in transformers 5.2x."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})


def long_step(sizes: tuple[int, ...], length: int, device: str, backend: str) -> Callable[[], float]:
    """A training step of a Qwen2 with gradient checkpointing and AdamW, all bfloat16; returns the loss."""
    width, layers, heads, key_heads, inner, vocabulary = sizes
    options = {"kind": "Qwen2", "key_heads": key_heads, "inner": inner, "positions": length, "std": 0.02}
    model = random_lm(width, layers, heads, vocabulary, device=device, dtype=torch.bfloat16, **options).train()
    model.set_attn_implementation(backend)
    enable_checkpointing(model)
    objective = block_objective(model, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batch, keys = random_batch(model, 1, length, device), batch_keys(1, device)

    def step() -> float:
        loss = objective.loss("model", batch, step=0, keys=keys).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


@part
def block_long_context() -> Iterator[str]:
    """One training step at 32,768 tokens of context (65,536 in the network) on one device."""
    length = 32_768
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step = long_step(_LONG, length, "cuda", "flex_attention")
    start = time.perf_counter()
    losses = [step()]
    print(f"   first step, compilation included: {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    losses.append(step())
    seconds, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**30
    print(
        f"   INFO long context: L = {length}, 2L = {2 * length}, {seconds:.2f} s a step, "
        f"{length / seconds:.0f} tokens/s, peak memory {peak:.1f} GiB, losses {losses[0]:.3f} {losses[1]:.3f}"
    )
    assert all(0.0 < value < 100.0 for value in losses), f"losses {losses}"
    yield from ()


def decoding_speed(model: Any, rows: int, prompt: int, new: int) -> Iterator[str]:
    """Token by token, blocks of 32 in 8 steps, and the blocks' bare network calls."""
    adapter, mask, device = CachedCausalLM(model), model.config.vocab_size - 1, next(model.parameters()).device
    prompts = torch.randint(2, mask, (rows, prompt), generator=seeded()).to(device)
    common = {"mask_token_id": mask, "max_new_tokens": new}
    blocks = {**common, "block_length": 32, "strategy": make_strategy("fixed_steps", steps=8)}
    ar = {**common, "block_length": 1, "strategy": "sequential"}
    output, passes = traced(adapter, prompts, **blocks)
    runs: dict[str, Callable[[], object]] = {
        "ar": lambda: decode_blocks(adapter, prompts, **ar),
        "blocks": lambda: decode_blocks(adapter, prompts, **blocks),
        "bare": bare_passes(adapter, prompts, passes),
    }
    seconds = interleaved({name: synchronised(run) for name, run in runs.items()}, repeats=5, warmup=1)
    rates = {name: rows * new / sorted(seconds[name])[2] for name in ("ar", "blocks")}
    print(
        f"   INFO decoding, batch {rows}: token by token {rates['ar']:.0f} tokens/s, blocks {rates['blocks']:.0f} "
        f"({float(output.tokens_per_call.mean()):.2f} tokens a call)"
    )
    yield bench_line(f"speedup_cuda_blocks_vs_ar_b{rows}", ratio(seconds["ar"], seconds["blocks"]), None)
    yield bench_line(f"cuda_decode_overhead_b{rows}", ratio(seconds["blocks"], seconds["bare"]))


@part
def block_decoding_speed() -> Iterator[str]:
    """Tokens a second at batch 1 and 16 (random bf16 weights, 4 tokens a pass), and the cost beside bare calls."""
    torch.cuda.empty_cache()
    options = {"kind": "Qwen2", "key_heads": 2, "inner": 4864, "positions": 2048, "std": 0.02, "device": "cuda"}
    model = random_lm(896, 24, 14, 151_936, dtype=torch.bfloat16, **options)
    for rows in (1, 16):
        yield from decoding_speed(model, rows, prompt=256, new=128)


@part
def crystal_search() -> Iterator[str]:
    """The zoo's crystal model and a search on it: the CPU's network outputs and first rollouts, and leaves a second."""
    import genkit

    here, there = (genkit.load("zoo:proto8-crystal") for _ in range(2))
    there = there.to("cuda")
    keys = draw_keys(torch.Generator().manual_seed(0), 64)
    state, t = here.codec.prior(keys), torch.linspace(0.05, 0.95, 64)
    with torch.no_grad():
        ours = here.model(state, t)
        away = there.model({name: value.cuda() for name, value in state.items()}, t.cuda())
    for name, value in ours.items():
        require(difference(value, away[name]), 1e-3, f"the network's {name} on the device")
    options = {"objectives": "density", "num_inference_steps": 32, "output_type": "pt", "slots": 64, "lam": 1.0}
    rates = {}
    for name, pipe in (("cpu", here), ("cuda", there)):
        pipe.set_progress_bar_config(disable=True)
        start = time.perf_counter()
        found = pipe(1024, 64, generator=seeded(), **options)
        rates[name] = found.diagnostics["network_calls"] / (time.perf_counter() - start)
        assert int(found.valid.sum()) == 64, f"{64 - int(found.valid.sum())} of 64 delivered crystals are not valid"
    print(f"   INFO network calls of a search a second: cpu {rates['cpu']:.0f}, cuda {rates['cuda']:.0f}")
    yield from ()


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
