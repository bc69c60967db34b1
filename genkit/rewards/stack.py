"""Several rewards side by side: one column an objective."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from genkit.errors import ConfigError
from genkit.rewards.base import Context, Reward, RewardOutput, Sample, reward_output

__all__ = ["StackedRewards"]


class StackedRewards(Reward):
    """r(x) = (r_1(x), …, r_M(x)), values (B, M) in the order of ``rewards``; a sample is valid where every part is.

    Where `WeightedSum` fixes how much one objective is worth in another, this leaves it to a multi-objective search.
    It has no gradient: a vector of values has none per sample.

    Logs of each part: ``<name>`` its mean over its own valid samples, ``<name>/invalid`` the share it could not judge,
    and its own logs as ``<name>/<key>``.

    Args:
        rewards: name → part; each part has one objective.

    Raises:
        ConfigError: no part, or one that is no reward.
    """

    differentiable = False

    def __init__(self, rewards: Mapping[str, Reward]) -> None:
        if not isinstance(rewards, Mapping) or not rewards:
            raise ConfigError(
                f"StackedRewards: rewards are a {type(rewards).__name__}; expected a mapping of names to rewards."
            )
        for name, part in rewards.items():
            if not isinstance(part, Reward):
                raise ConfigError(
                    f"StackedRewards: {name!r} is a {type(part).__name__}, expected a Reward; "
                    "FunctionReward wraps a function."
                )
        self.rewards = dict(rewards)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the objectives, in the order of the columns."""
        return tuple(self.rewards)

    def values(self, sample: Sample, context: Context | None) -> RewardOutput:
        logs: dict[str, Tensor | float] = {}
        columns, masks = [], []
        for name, part in self.rewards.items():
            output = part(sample, context)
            if output.values.ndim != 1:
                raise ConfigError(
                    f"part {name!r} has {output.values.shape[1]} objectives, expected one; stack its parts themselves."
                )
            columns.append(output.values)
            masks.append(output.valid)
            logs[name] = output.mean().detach()
            logs[f"{name}/invalid"] = (~output.valid).to(output.values.dtype).mean()
            logs |= {f"{name}/{key}": value for key, value in output.logs.items()}
        kind = columns[0].dtype
        for column in columns[1:]:
            kind = torch.promote_types(kind, column.dtype)
        table = torch.stack([column.to(kind) for column in columns], dim=1)
        return reward_output(table, torch.stack(masks).all(dim=0), logs)

    def __repr__(self) -> str:
        return f"StackedRewards({', '.join(self.rewards)})"
