"""A student's sampling beside its bare network calls, and what an iteration of each way to reward a student costs.

    OMP_NUM_THREADS=1 python benchmarks/distillation_step.py

* ``student_sampling``: a call of the pipeline over K bare forward passes of the same network at the same batch.
* ``rmmd_vs_<peer>`` (INFO): seconds of one iteration (one turn of the auxiliary and one of the student, on-policy) over
  one iteration of the peer: DRaFT-1, DRaFT-K (the gradient through all K steps), and a DMD2-style one (five turns of
  the fake network and one of the student). Forward and backward only, on equal networks.
* ``memory_<arm>`` (INFO): bytes kept for the backward pass of the student's turn, over those of DRaFT-1.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from _bench import Ratio, bench_line, info_line, interleaved, keep_memory, one_thread, ratio
from torch import Tensor

from genkit.pipelines.rmmd.baselines import DMD2Objective
from genkit.pipelines.rmmd.networks import MLPDenoiser
from genkit.pipelines.rmmd.objective import MomentMatchingObjective
from genkit.pipelines.rmmd.pipeline import RMMDPipeline
from genkit.rewards import Symmetry
from genkit.samplers.noise import training_keys
from genkit.schedulers import VPScheduler
from genkit.training.objective import Objective, Phase
from genkit.training.objectives import GradientWindow, RewardGradientObjective

SHAPE = (1, 16, 16)


def network(width: int, blocks: int) -> MLPDenoiser:
    """A network with a random last layer."""
    torch.manual_seed(0)
    net = MLPDenoiser(list(SHAPE), width=width, blocks=blocks)
    torch.nn.init.normal_(net.mlp.output.weight, std=0.02)
    return net


def objectives(net: MLPDenoiser, steps: int) -> dict[str, tuple[Objective, tuple[str, ...]]]:
    """Arm → its objective and the turns of one iteration."""
    scheduler, reward = VPScheduler(), Symmetry()
    shared: dict[str, Any] = {"num_inference_steps": steps, "shape": SHAPE}

    def nets() -> list[MLPDenoiser]:
        return [copy.deepcopy(net) for _ in range(3)]

    def moments() -> dict[str, Any]:
        return {"phases": [Phase("reward", 10)], "reward": reward, "lam": 0.1, "reduction": "mean", **shared}

    def draft(kind: Any) -> RewardGradientObjective:
        options: dict[str, Any] = {"window": GradientWindow(kind), "solver": "ancestral", "eta": 1.0}
        return RewardGradientObjective(copy.deepcopy(net), scheduler, reward, **options, **shared)

    rmmd = MomentMatchingObjective(*nets(), scheduler, **moments())
    dmd = DMD2Objective(*nets(), scheduler, **moments())
    for objective in (rmmd, dmd):
        objective.start_phase("reward")
    return {
        "rmmd": (rmmd, ("auxiliary", "student")),
        "draft_1": (draft("last_k"), ("denoiser",)),
        "draft_k": (draft("full"), ("denoiser",)),
        "dmd2": (dmd, ("auxiliary",) * 5 + ("student",)),
    }


def iteration(objective: Objective, turns: tuple[str, ...], batch: dict[str, Tensor]) -> Callable[[], None]:
    """Forward and backward of the turns; the other networks need no gradients."""

    def run() -> None:
        for turn in turns:
            for name, module in objective.networks().items():
                module.requires_grad_(name == turn)
            step = 1 if turn == "student" else 0
            keys = training_keys(0, step, batch["sample_id"])
            objective.loss(turn, batch, step=step, keys=keys).loss.backward()
            objective.networks()[turn].zero_grad(set_to_none=True)

    return run


def saved_bytes(objective: Objective, turn: str, batch: dict[str, Tensor]) -> int:
    """Bytes of distinct storages that a turn's loss keeps for its backward pass."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    for name, module in objective.networks().items():
        module.requires_grad_(name == turn)
    parameters = {p.untyped_storage().data_ptr() for m in objective.networks().values() for p in m.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = objective.loss(turn, batch, step=1, keys=training_keys(0, 1, batch["sample_id"])).loss
    del loss
    return sum(size for place, size in kept.items() if place not in parameters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="K")
    options = parser.parse_args()
    one_thread()
    keep_memory()
    net = network(options.width, options.blocks)
    pipe = RMMDPipeline.from_teacher(copy.deepcopy(net), VPScheduler(), num_inference_steps=options.steps)
    pipe.set_progress_bar_config(disable=True)
    x, t = torch.randn(options.batch_size, *SHAPE), torch.full((options.batch_size,), 0.5)
    generator = torch.Generator().manual_seed(0)

    def bare() -> None:
        with torch.no_grad():
            for _ in range(options.steps):
                pipe.student(x, t)

    times = interleaved(
        {"genkit": lambda: pipe(options.batch_size, generator=generator), "bare": bare}, options.repeats
    )
    one_ms = 1000 * statistics.median(times["bare"]) / options.steps
    print(f"INFO bare forward {one_ms:.1f} ms (the goal holds from 5 ms on)")
    measured = ratio(times["genkit"], times["bare"])
    print(bench_line("student_sampling", measured) if one_ms >= 5 else info_line("student_sampling", measured, "small"))

    batch = {"sample": x, "sample_id": torch.arange(options.batch_size)}
    arms = objectives(net, options.steps)
    runs = {name: iteration(objective, turns, batch) for name, (objective, turns) in arms.items()}
    times = interleaved(runs, max(options.repeats // 2, 3))
    for peer in ("draft_1", "draft_k", "dmd2"):
        print(info_line(f"rmmd_vs_{peer}", ratio(times["rmmd"], times[peer]), f"K={options.steps}"))
    sizes = {name: saved_bytes(objective, turns[-1], batch) for name, (objective, turns) in arms.items()}
    for name in ("rmmd", "draft_k", "dmd2"):
        share = sizes[name] / sizes["draft_1"]
        note = f"{sizes[name] / 2**20:.1f} MiB, draft_1 {sizes['draft_1'] / 2**20:.1f} MiB"
        print(info_line(f"memory_{name}", Ratio(share, share, share, 1), note))


if __name__ == "__main__":
    main()
