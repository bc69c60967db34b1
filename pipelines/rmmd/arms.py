"""The arms of the comparison: every way to give a few-step student a reward, from one base and at one budget.

An arm is run on a small grid, learning rates times strengths (how much the reward weighs against what holds the student
in place), and measured a few times on the way: the points of its Pareto front.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from genkit.errors import ConfigError
from genkit.pipelines.rmmd.baselines import DiffInstructObjective, HyperNoiseObjective, NoisyStart
from genkit.pipelines.rmmd.networks import as_denoiser
from genkit.pipelines.rmmd.objective import MomentMatchingObjective
from genkit.pipelines.rmmd.pipeline import RMMDPipeline
from genkit.rewards import Reward
from genkit.samplers import rollout
from genkit.samplers.noise import training_keys
from genkit.training.objective import Objective, Phase
from genkit.training.objectives import GradientWindow, PolicyGradientObjective, RewardGradientObjective

__all__ = ["ARMS", "LEARNING_RATES", "STRENGTHS", "Arm", "Sampler", "make_arm", "sampler", "unit_strength"]

LEARNING_RATES = (3e-6, 3e-5, 3e-4)
STRENGTHS = (0.3, 1.0, 3.0)
#: weights of the distance to the reference (or of the divergence from it) that back-propagation and policy gradients
#: have in place of a strength: a multiple of λ alone acts on nothing under Adam
TIES = (0.0, 0.5, 5.0)
DIVERGENCES = (0.0, 0.01, 0.1)

Sampler = Callable[[Mapping[str, Tensor] | None, int, torch.Generator], Tensor]


@dataclass(frozen=True)
class Arm:
    """How an arm is trained.

    Args:
        kind: ``"moment"``, ``"gradient"``, ``"policy"``, ``"noise"`` or ``"one_step"``.
        options: of its objective.
        base: the pipeline that it starts from.
    """

    kind: str
    options: Mapping[str, Any]
    base: str = "student"


ARMS: dict[str, Arm] = {
    "rmmd": Arm("moment", {}),
    "rmmd_offpolicy": Arm("moment", {"on_policy": False}),
    "rmmd_no_l2": Arm("moment", {"lam_reg": 0.0}),
    "draft_1": Arm("gradient", {"window": GradientWindow("last_k", 1)}),
    "draft_k": Arm("gradient", {"window": GradientWindow("last_k", 2)}),
    "draft_lv": Arm("gradient", {"window": GradientWindow("draft_lv", 1)}),
    "hypernoise": Arm("noise", {}),
    "policy_gradient": Arm("policy", {"advantage": "group", "group_size": 8}),
    "di_plus_plus": Arm("one_step", {}, "one_step"),
    "distil_then_reward_only": Arm("moment", {"weight": "none"}),
}


def make_arm(
    arm: Arm, pipe: RMMDPipeline, data: Any, reward: Reward, steps: int, number: int, unit: float
) -> tuple[Objective, Sampler]:
    """An arm's objective on copies of the pipeline's networks, and how to sample what it has trained so far.

    Args:
        arm: which.
        pipe: the base; it is not changed.
        data: the training set.
        reward: what is maximised.
        steps: its length.
        number: which strength of the grid.
        unit: see :func:`unit_strength`.
    """
    if arm.kind in ("moment", "one_step"):
        objective: Any = _moment_objective(arm, pipe, data, reward, steps, STRENGTHS[number] * unit)
        return objective, sampler(objective.student, pipe)
    network = as_denoiser(copy.deepcopy(pipe.student), pipe.scheduler.prediction_type)
    told = [name for name in ("class_labels", "condition") if name in data[torch.zeros(1, dtype=torch.int64)]]
    shape, count, eta = pipe.config["sample_shape"], pipe.config["num_inference_steps"], pipe.config["eta"]
    shared = {"num_inference_steps": count, "shape": shape, "condition_names": told, "eta": eta, **arm.options}
    if arm.kind == "noise":
        shared |= {"lam": STRENGTHS[number] * unit, "solver": "ancestral"}
        objective = HyperNoiseObjective(network, pipe.scheduler, reward, **shared)
        return objective, sampler(objective.denoiser, pipe, objective.noise)
    tie = (TIES if arm.kind == "gradient" else DIVERGENCES)[number]
    reference = copy.deepcopy(network).eval().requires_grad_(False) if tie else None
    shared |= {"reg": tie, "reference": reference}
    if arm.kind == "gradient":
        objective = RewardGradientObjective(network, pipe.scheduler, reward, solver="ancestral", **shared)
    else:
        objective = PolicyGradientObjective(network, pipe.scheduler, reward, **shared)
    return objective, sampler(network, pipe)


def _moment_objective(
    arm: Arm, pipe: RMMDPipeline, data: Any, reward: Reward, steps: int, lam: float
) -> MomentMatchingObjective:
    kind = pipe.scheduler.prediction_type
    student, auxiliary, teacher = (
        as_denoiser(copy.deepcopy(network), kind) for network in (pipe.student, pipe.auxiliary, pipe.teacher)
    )
    first = data[torch.zeros(1, dtype=torch.int64)]
    shared: dict[str, Any] = {
        "phases": [Phase("reward", steps)],
        "reward": reward,
        "lam": lam,
        "shape": pipe.config["sample_shape"],
        "guidance_scale": pipe.config["guidance_scale"],
        "condition_names": [name for name in ("class_labels", "condition") if name in first],
        "reduction": "mean",
        **arm.options,
    }
    if arm.kind == "one_step":
        return DiffInstructObjective(student, auxiliary, teacher, pipe.scheduler, **shared)
    shared |= {"num_inference_steps": pipe.config["num_inference_steps"], "eta": pipe.config["eta"]}
    return MomentMatchingObjective(student, auxiliary, teacher, pipe.scheduler, **shared)


def unit_strength(arm: Arm, pipe: RMMDPipeline, data: Any, reward: Reward, count: int = 512) -> float:
    """λ at which the reward's gradient is as large as what holds the student: the moments' gap, a shift of 1 in noise.

    Measured on one batch of the data, at the start of training.
    """
    index = torch.arange(min(count, len(data)))
    batch = data[index] | {"sample_id": index}
    if arm.kind == "moment":
        return pipe.lam_for_ratio(1.0, data, {"reward": reward, "reduction": "mean"}, count)
    if arm.kind == "one_step":
        objective = _moment_objective(arm, pipe, data, reward, 2, 1.0)
        objective.start_phase("reward")
        logs = objective.loss("student", batch, step=1, keys=training_keys(0, 0, index)).logs
        ratio = float(logs["reward_gradient_ratio"])
    else:
        noise = training_keys(0, 0, index).at(purpose="unit").normal(batch["sample"].shape[1:])
        slope = reward.value_and_grad(batch["sample"] + 0.1 * noise, batch)[1]
        ratio = float(slope.square().mean().sqrt()) * slope[0].numel()
    if not (math.isfinite(ratio) and ratio > 0.0):
        raise ConfigError(f"the gradient of {reward!r} is {ratio} times what holds the student; expected above 0")
    return 1.0 / ratio


def sampler(network: nn.Module, pipe: RMMDPipeline, noise: nn.Module | None = None, **options: Any) -> Sampler:
    """(cond, count, generator) → samples (count, \\*) of the network's K-step walk, as it is at that moment.

    Args:
        network: (x, t, cond) → output.
        pipe: its grid, stochasticity and shape.
        noise: f of HyperNoise.
        options: ``num_inference_steps``, ``solver`` and ``eta`` in place of the pipeline's.
    """
    options = {
        "num_inference_steps": pipe.config["num_inference_steps"],
        "solver": "ancestral",
        "eta": pipe.config["eta"],
    } | options
    if options["solver"] != "ancestral":
        options.pop("eta")

    @torch.no_grad()
    def sample(cond: Mapping[str, Tensor] | None, count: int, generator: torch.Generator) -> Tensor:
        modes = [(m, m.training) for m in network.modules()]
        network.eval()
        scheduler = pipe.scheduler if noise is None else NoisyStart(pipe.scheduler, noise, cond)
        shape = (count, *pipe.config["sample_shape"])
        found = rollout(network, scheduler, shape=shape, cond=cond, generator=generator, **options).sample
        for module, mode in modes:
            module.training = mode
        return found

    return sample


def grid() -> Iterator[tuple[float, int]]:
    """(learning rate, number of the strength)."""
    for rate in LEARNING_RATES:
        for number in range(len(STRENGTHS)):
            yield rate, number
