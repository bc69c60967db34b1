"""What a walk costs beside the bare forward passes of its network: wall / (NFE x bare forward), one thread.

Every solver, plain and with a callback, on networks whose forward pass takes 5 ms or more:

* ``unet``: diffusers' UNet2DModel on (8, 3, 32, 32), the case of a picture;
* ``mlp``: three layers of width 1024 on (1024, 64), the case of a small state and a cheap network;
* ``thin``, printed as INFO: width 512 on (4096, 64), where a number of the state costs the network only 80 ns. A pass
  over such a state is slow beside the network (memory), and fresh noise more so: about 20 ns a number (Philox and
  Box-Muller in eager tensor operations; compiled, about 5 ns). The stochastic solver on ``mlp`` is INFO for the same
  reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _bench import bench_line, info_line, interleaved, keep_memory, one_thread, ratio

from genkit.samplers import rollout
from genkit.samplers.solvers import SOLVERS
from genkit.schedulers import FlowScheduler

STEPS, LEAST_MS = 6, 5.0
ONE_EVALUATION = ("euler", "ancestral", "dpmpp_2m", "unipc")


class MLP(nn.Module):
    """(B, 64) and a time → (B, 64)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(65, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 64)
        )

    def forward(self, x: Tensor, t: Tensor, cond: object = None) -> Tensor:
        return self.layers(torch.cat((x, t[:, None]), dim=1))


class UNet(nn.Module):
    """diffusers' UNet2DModel, small, with times in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import UNet2DModel

        self.unet = UNet2DModel(
            sample_size=32,
            layers_per_block=1,
            block_out_channels=(32, 64),
            norm_num_groups=8,
            down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D"),
        )

    def forward(self, x: Tensor, t: Tensor, cond: object = None) -> Tensor:
        return self.unet(x, t * 1000).sample


def bare(network: nn.Module, x: Tensor, calls: int) -> Callable[[], object]:
    """``calls`` forward passes and nothing else."""
    t = torch.full((len(x),), 0.5)

    @torch.no_grad()
    def run() -> None:
        for _ in range(calls):
            network(x, t)

    return run


def walk(network: nn.Module, x: Tensor, solver: str, callback: Callable[..., None] | None) -> Callable[[], object]:
    """One walk of ``STEPS`` steps."""
    scheduler = FlowScheduler(eta=0.5)

    def run() -> object:
        generator = torch.Generator().manual_seed(0)
        options = {"num_inference_steps": STEPS, "solver": solver, "callback_on_step_end": callback}
        return rollout(network, scheduler, x, generator=generator, **options)

    return run


def watch(step: int, t: float, values: dict[str, Tensor]) -> None:
    """A callback that looks at the state and at the clean prediction, and changes nothing."""
    values["sample"], values["x0"]


def measure(name: str, network: nn.Module, x: Tensor, repeats: int, info: Sequence[str] = ()) -> list[str]:
    """The lines of one network; solvers in ``info`` are printed without a goal."""
    forward = min(interleaved({"forward": bare(network, x, 1)}, 10)["forward"]) * 1e3
    print(f"{name}: bare forward {forward:.2f} ms on {tuple(x.shape)}, {STEPS} steps", flush=True)
    lines = []
    for solver in SOLVERS:
        calls = STEPS if solver in ONE_EVALUATION else 2 * (STEPS - 1) + 1
        runs = {
            "bare": bare(network, x, calls),
            "plain": walk(network, x, solver, None),
            "callback": walk(network, x, solver, watch),
        }
        seconds = interleaved(runs, repeats, warmup=1)
        for kind in ("plain", "callback"):
            label, measured = f"rollout_{solver}_{kind}_{name}", ratio(seconds[kind], seconds["bare"])
            if forward < LEAST_MS:
                line = info_line(label, measured, f"(forward {forward:.1f} ms, below {LEAST_MS:.0f} ms)")
            elif solver in info:
                line = info_line(label, measured, "(bound by the state's memory or by its noise)")
            else:
                line = bench_line(label, measured)
            print(line, flush=True)
            lines.append(line)
    return lines


def main() -> None:
    """Measures both networks; the BENCH lines come last."""
    one_thread()
    keep_memory()
    torch.manual_seed(0)
    lines = measure("unet", UNet().eval(), torch.randn(8, 3, 32, 32), repeats=7)
    lines += measure("mlp", MLP(1024).eval(), torch.randn(1024, 64), repeats=11, info=["ancestral"])
    lines += measure("thin", MLP(512).eval(), torch.randn(4096, 64), repeats=5, info=list(SOLVERS))
    print()
    for line in sorted(lines, key=lambda line: line.startswith("BENCH")):
        print(line)


if __name__ == "__main__":
    main()
