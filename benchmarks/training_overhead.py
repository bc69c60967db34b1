"""A training step of genkit beside the same step written bare: forward, backward, clip, AdamW, moving average.

    OMP_NUM_THREADS=1 python benchmarks/training_overhead.py

Both train equal networks on batches of the same data in one process, in turns of one step each. The bare loop does
nothing else: no noise keys, checks, logs or checkpoints.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping

import torch
from _bench import bench_line, info_line, interleaved, one_thread, ratio
from torch import Tensor, nn

from genkit.samplers.noise import Keys
from genkit.training import LossOutput, Objective, TensorData, Trainer, TrainerConfig

DECAY = 0.999


def make_net(width: int, depth: int) -> nn.Sequential:
    """A plain network with about depth · width² parameters; equal at every call."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.SiLU()]
    return nn.Sequential(*layers)


class Regression(Objective):
    """Mean squared error, nothing more."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def networks(self) -> Mapping[str, nn.Module]:
        return {"net": self.module}

    def loss(self, turn: str, batch: Mapping[str, Tensor], *, step: int, keys: Keys) -> LossOutput:
        return LossOutput((self.net("net")(batch["x"]) - batch["y"]).square().mean())


def bare_steps(module: nn.Module, data: TensorData, batch_size: int) -> Iterator[float]:
    """The limit: the five parts of a step over all tensors at once, and a loss that is read."""
    parameters = list(module.parameters())
    average = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=True)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))
    for step in range(1_000_000):
        batch = data[order.roll(-step * batch_size)[:batch_size]]
        loss = (module(batch["x"]) - batch["y"]).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(average, parameters, 1.0 - DECAY)
        yield loss.item()


def genkit_steps(module: nn.Module, data: TensorData, batch_size: int, folder: str) -> Iterator[float]:
    """The same through the Trainer."""
    config = TrainerConfig(
        output_dir=folder,
        max_steps=1_000_000,
        save_steps=1_000_000,
        batch_size=batch_size,
        learning_rate=1e-4,
        ema_decay=DECAY,
        progress=False,
    )
    return (entry.loss for entry in Trainer(Regression(module), config, data).train())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=256)
    options = parser.parse_args()
    one_thread()
    generator = torch.Generator().manual_seed(0)
    shape = (16 * options.batch_size, options.width)
    data = TensorData({name: torch.randn(shape, generator=generator) for name in ("x", "y")})
    with tempfile.TemporaryDirectory() as folder:
        ours = genkit_steps(make_net(options.width, options.depth), data, options.batch_size, folder)
        bare = bare_steps(make_net(options.width, options.depth), data, options.batch_size)
        times = interleaved({"genkit": lambda: next(ours), "bare": lambda: next(bare)}, options.pairs, warmup=3)
    bare_ms, our_ms = (1000 * statistics.median(times[name]) for name in ("bare", "genkit"))
    print(f"INFO bare step {bare_ms:.1f} ms (the goal holds from 50 ms on), genkit {our_ms:.1f} ms")
    measured = ratio(times["genkit"], times["bare"])
    name = "training_step_overhead"
    print(bench_line(name, measured) if bare_ms >= 50 else info_line(name, measured, "bare step below 50 ms"))


if __name__ == "__main__":
    main()
