"""Rewards made of rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from genkit.errors import ConfigError
from genkit.rewards.base import Context, Reward, RewardOutput, Sample, reward_output

__all__ = ["WeightedSum"]


class WeightedSum(Reward):
    """r(x) = Σ_i w_i r_i(x),  ∇r = Σ_i w_i ∇r_i; a sample is valid where every part is.

    Logs of each part: ``<name>`` its mean over its own valid samples, ``<name>/invalid`` the share it could not judge,
    and after `value_and_grad` ``<name>/grad_norm`` (mean ‖w_i ∇r_i‖ over the batch) and ``<name>/grad_ratio`` (its
    share of the sum of these norms): what shows that one part drowns another.

    Args:
        rewards: name → part; each part has one objective.
        weights: name → w_i, finite; 1 by default. A part of weight 0 is evaluated and logged, but adds no gradient.
    """

    def __init__(self, rewards: Mapping[str, Reward], weights: Mapping[str, float] | None = None) -> None:
        _check_parts(rewards)
        weights = dict.fromkeys(rewards, 1.0) if weights is None else weights
        _check_weights(weights, rewards)
        self.rewards, self.weights = dict(rewards), dict(weights)
        self.differentiable = all(part.differentiable for name, part in rewards.items() if weights[name])

    def values(self, sample: Sample, context: Context | None) -> RewardOutput:
        return self._sum({name: part(sample, context) for name, part in self.rewards.items()}, {})

    def value_and_grad(self, sample: Sample, context: Context | None = None) -> tuple[RewardOutput, Any]:
        """Values and Σ_i w_i ∇r_i; each part's own ``value_and_grad`` is asked, so that it may be a special one."""
        blocked = [n for n, part in self.rewards.items() if self.weights[n] and not part.differentiable]
        if blocked:
            raise ConfigError(
                f"{', '.join(blocked)} not differentiable; give weight 0 to log it only, or leave it out."
            )
        outputs: dict[str, RewardOutput] = {}
        gradients: dict[str, dict[str, Tensor]] = {}
        for name, part in self.rewards.items():
            if self.weights[name]:
                outputs[name], gradient = part.value_and_grad(sample, context)
                gradients[name] = _scaled(gradient, self.weights[name])
            else:
                with torch.no_grad():
                    outputs[name] = part(sample, context)
        output = self._sum(outputs, _gradient_logs(gradients))
        return output, self._total_gradient(sample, gradients, output.valid)

    def _sum(self, outputs: Mapping[str, RewardOutput], logs: Mapping[str, Tensor | float]) -> RewardOutput:
        parts: dict[str, Tensor | float] = dict(logs)
        for name, output in outputs.items():
            if output.values.ndim != 1:
                raise ConfigError(f"part {name!r} has {output.values.shape[1]} objectives; combine them first.")
            parts[name] = output.mean().detach()
            parts[f"{name}/invalid"] = (~output.valid).to(output.values.dtype).mean()
            parts |= {f"{name}/{key}": value for key, value in output.logs.items()}
        used = [name for name in outputs if self.weights[name]] or list(outputs)
        values = torch.stack([self.weights[n] * outputs[n].values for n in used]).sum(dim=0)
        return reward_output(values, torch.stack([outputs[n].valid for n in used]).all(dim=0), parts)

    @staticmethod
    def _total_gradient(sample: Sample, gradients: Mapping[str, dict[str, Tensor]], valid: Tensor) -> Any:
        tensors = dict(sample) if isinstance(sample, Mapping) else {"": sample}
        total = {key: torch.zeros_like(value) for key, value in tensors.items()}
        for gradient in gradients.values():
            for key, value in gradient.items():
                total[key] = total[key] + value
        for key, value in total.items():
            total[key] = value * valid.reshape(-1, *(1,) * (value.ndim - 1))
        return total if isinstance(sample, Mapping) else total[""]

    def __repr__(self) -> str:
        return f"WeightedSum({', '.join(f'{self.weights[n]:g} {n}' for n in self.rewards)})"


def _check_parts(rewards: Any) -> None:
    if not isinstance(rewards, Mapping):
        raise ConfigError(
            f"WeightedSum: rewards are a {type(rewards).__name__}, expected a mapping of names to rewards."
        )
    for name, part in rewards.items():
        if not isinstance(part, Reward):
            raise ConfigError(
                f"WeightedSum: {name!r} is a {type(part).__name__}, expected a Reward; FunctionReward wraps a function."
            )


def _check_weights(weights: Any, rewards: Mapping[str, Reward]) -> None:
    if not isinstance(weights, Mapping):
        raise ConfigError(
            f"WeightedSum: weights are a {type(weights).__name__}, expected a mapping of names to numbers."
        )
    if not rewards or weights.keys() != rewards.keys():
        raise ConfigError(f"expected one weight a reward: rewards {list(rewards)}, weights {list(weights)}.")
    for name, weight in weights.items():
        if not isinstance(weight, Real) or not math.isfinite(weight):
            raise ConfigError(f"weight of {name!r} is {weight!r}, expected a finite number.")


def _scaled(gradient: Any, weight: float) -> dict[str, Tensor]:
    tensors = gradient if isinstance(gradient, Mapping) else {"": gradient}
    return {key: weight * value for key, value in tensors.items()}


def _gradient_logs(gradients: Mapping[str, dict[str, Tensor]]) -> dict[str, Tensor | float]:
    norms = {name: _mean_norm(parts) for name, parts in gradients.items()}
    total = sum(norms.values(), torch.zeros(()))
    logs: dict[str, Tensor | float] = {}
    for name, norm in norms.items():
        logs[f"{name}/grad_norm"] = norm
        logs[f"{name}/grad_ratio"] = norm / total
    return logs


def _mean_norm(gradient: Mapping[str, Tensor]) -> Tensor:
    squares = [g.detach().float().reshape(g.shape[0], -1).square().sum(dim=1) for g in gradient.values()]
    return torch.stack(squares).sum(dim=0).sqrt().mean().cpu()
