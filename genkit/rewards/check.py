"""The start-up check of a differentiable reward: a cut or wrong gradient raises no error and trains nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from genkit.errors import ConfigError
from genkit.rewards.base import Context, Reward, RewardOutput, Sample
from genkit.rewards.combine import WeightedSum

__all__ = ["RewardCheck", "check_differentiable"]

#: Trial steps as shares of the sample's size: large enough for float32 rounding, small enough for curvature.
_STEPS = (1e-3, 1e-2, 1e-4, 1e-1)


@dataclass(frozen=True)
class RewardCheck:
    """What `check_differentiable` measured.

    Args:
        gradient_norm: ‖∇ Σ_b r_b‖ over the valid samples.
        rise: change of Σ_b r_b along the gradient.
        ratio: rise ÷ the rise that the gradient predicts; near 1 for an exact gradient.
        valid: how many samples could be judged.
    """

    gradient_norm: float
    rise: float
    ratio: float
    valid: int


def check_differentiable(
    reward: Reward, sample: Sample, context: Context | None = None, *, name: str | None = None
) -> RewardCheck:
    """Check that a reward has a non-zero gradient and rises along it by a finite step; of a sum, every part.

    Args:
        reward: what training will maximise.
        sample: a typical batch (B, *), not yet optimal.
        name: how errors call the reward.

    Raises:
        ConfigError: names the reward (or the part of a `WeightedSum`) whose gradient is missing, zero or misleading.
    """
    name = name or repr(reward)
    if isinstance(reward, WeightedSum):
        for part, member in reward.rewards.items():
            if reward.weights[part]:
                check_differentiable(member, sample, context, name=f"{part!r} of {name}")
    output, gradient = reward.value_and_grad(sample, context)
    count = int(output.valid.sum())
    if count == 0:
        raise ConfigError(f"{name}: none of {output.valid.numel()} samples could be judged; check sample and context.")
    norm = _norm(gradient)
    if norm == 0:
        raise ConfigError(
            f"{name}: the gradient is 0 on all {count} valid samples, so training could not move. Look for detach(), "
            "rounding, argmax or no_grad inside it, or give samples that are not yet optimal."
        )
    rise, ratio = _best_rise(reward, sample, context, output, gradient, norm)
    if not rise > 0:
        raise ConfigError(
            f"{name}: the value does not rise along its gradient (change {rise:.3g} where {rise / ratio:.3g} is "
            "predicted): a part of the graph is cut or has the wrong sign."
        )
    return RewardCheck(norm, rise, ratio, count)


def _norm(gradient: Any) -> float:
    tensors = gradient.values() if isinstance(gradient, Mapping) else [gradient]
    return float(torch.stack([g.double().square().sum() for g in tensors]).sum().sqrt())


def _best_rise(
    reward: Reward, sample: Sample, context: Context | None, output: RewardOutput, gradient: Any, norm: float
) -> tuple[float, float]:
    """Rise and its ratio to the prediction at the trial step where the two agree best."""
    size = max(_norm(sample), 1.0)
    trials = []
    for share in _STEPS:
        step = share * size / norm
        with torch.no_grad():
            moved = reward(_moved(sample, gradient, step), context)
        both = output.valid & moved.valid
        rise = float((moved.filled().double() - output.filled().double())[both].sum())
        trials.append((rise, rise / (step * norm**2)))
    return min(trials, key=lambda trial: abs(trial[1] - 1.0))


def _moved(sample: Sample, gradient: Any, step: float) -> Sample:
    if isinstance(sample, Tensor):
        return sample + step * gradient
    return {k: v + step * gradient[k] if v.is_floating_point() else v for k, v in sample.items()}
