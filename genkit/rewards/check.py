"""The start-up check of a differentiable reward: a cut or wrong gradient raises no error and trains nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from genkit.errors import ConfigError
from genkit.rewards.base import Context, Reward, RewardOutput, Sample
from genkit.rewards.combine import WeightedSum

__all__ = ["RewardCheck", "check_differentiable"]

#: Trial steps as shares of the sample's size: small ones for curvature, large ones for rounding.
_STEPS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
_RATIOS = (0.5, 1.5)


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
    """Check that a reward has a non-zero gradient and rises along it as it predicts; of a sum, every part.

    The rise of Σ_b r_b by a finite step is compared with ⟨∇, step⟩; their ratio must lie in [0.5, 1.5] at a step small
    enough for curvature and large enough for rounding. A part of the sample that is cut off entirely (its gradient is
    0) goes unseen: nothing moves along it.

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
    rise, ratio = _measured_rise(reward, sample, context, output, gradient)
    if not rise > 0:
        raise ConfigError(
            f"{name}: the value does not rise along its gradient (change {rise:.3g}, {ratio:.3g} of what is "
            "predicted): a part of the graph is cut or has the wrong sign."
        )
    if not _RATIOS[0] <= ratio <= _RATIOS[1]:
        raise ConfigError(
            f"{name}: along its gradient the value rises {ratio:.3g} times what the gradient predicts, expected "
            f"{_RATIOS[0]} to {_RATIOS[1]}: a part of the graph is cut (detach(), no_grad) or scaled."
        )
    return RewardCheck(norm, rise, ratio, count)


def _norm(gradient: Any) -> float:
    return float(torch.stack([g.double().square().sum() for g in _parts(gradient).values()]).sum().sqrt())


def _measured_rise(
    reward: Reward, sample: Sample, context: Context | None, output: RewardOutput, gradient: Any
) -> tuple[float, float]:
    """Rise and its ratio to the prediction at the smallest step that curvature and rounding leave alone.

    That is where two neighbouring steps agree within a tenth; where none do, the step with the ratio nearest 1.
    """
    size = max(_norm(sample), 1.0) / _norm(gradient)
    trials = [_trial(reward, sample, context, output, gradient, share * size) for share in _STEPS]
    floor = 8 * torch.finfo(output.values.dtype).eps * float(output.filled().double().norm())
    clear = [trial for trial in trials if abs(trial[0]) > floor]
    for (_, ratio), larger in pairwise(clear):
        if abs(ratio - larger[1]) <= 0.1 * abs(larger[1]):
            return larger
    return min(clear or trials, key=lambda trial: abs(trial[1] - 1.0))


def _trial(
    reward: Reward, sample: Sample, context: Context | None, output: RewardOutput, gradient: Any, step: float
) -> tuple[float, float]:
    """Rise by a step along the gradient and its ratio to ⟨∇, moved − sample⟩, the step as rounding left it."""
    moved = _moved(sample, gradient, step)
    with torch.no_grad():
        after = reward(moved, context)
    both = output.valid & after.valid
    rise = float((after.filled().double() - output.filled().double())[both].sum())
    predicted = _predicted(sample, moved, gradient, both)
    return (rise, rise / predicted) if predicted > 0 else (0.0, 0.0)


def _predicted(sample: Sample, moved: Sample, gradient: Any, both: Tensor) -> float:
    before, after, slopes = _parts(sample), _parts(moved), _parts(gradient)
    terms = [slopes[k].double() * (after[k].double() - before[k].double()) for k in before]
    return math.fsum(float(term[both].sum()) for term in terms)


def _parts(value: Any) -> Mapping[str, Tensor]:
    return value if isinstance(value, Mapping) else {"": value}


def _moved(sample: Sample, gradient: Any, step: float) -> Sample:
    if isinstance(sample, Tensor):
        return sample + step * gradient
    return {k: v + step * gradient[k] if v.is_floating_point() else v for k, v in sample.items()}
