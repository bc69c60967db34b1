"""What objectives of a reward share: the network, the frozen reference it stays near, and how much both weigh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from genkit._checks import checked_count, checked_number
from genkit.errors import ConfigError
from genkit.rewards import Reward
from genkit.training.objective import Objective

__all__ = ["RewardObjective"]


class RewardObjective(Objective):
    """Trains ``denoiser`` on a reward of the samples of its own K-step walk; a subclass says how.

    Args:
        denoiser: (x_t, t, cond) → model output; what is trained.
        scheduler: the chain.
        reward: of clean samples.
        num_inference_steps: K, steps of the walk.
        shape: of one sample.
        lam: weight of the reward, above 0.
        reg: weight of the distance to the reference, 0 without one.
        reference: a frozen network of the same kind; None: no such term.
        condition_names: entries of a batch that the denoiser (and the reward) is told.

    Raises:
        ConfigError: a weight out of range, or ``reg`` without a reference.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        scheduler: Any,
        reward: Reward,
        *,
        num_inference_steps: int,
        shape: Sequence[int],
        lam: float,
        reg: float,
        reference: nn.Module | None,
        condition_names: Sequence[str],
    ) -> None:
        self.lam = checked_number("lam", lam, "a number above 0", lambda v: 0.0 < v < math.inf)
        self.reg = checked_number("reg", reg, "a number, at least 0", lambda v: 0.0 <= v < math.inf)
        if self.reg > 0.0 and reference is None:
            raise ConfigError(f"reg={reg} needs a reference network to stay near; pass reference=, or reg=0")
        self.denoiser, self.scheduler, self.reward, self.reference = denoiser, scheduler, reward, reference
        self.num_inference_steps = checked_count("num_inference_steps", num_inference_steps)
        self.shape, self.condition_names = tuple(shape), tuple(condition_names)

    def networks(self) -> Mapping[str, nn.Module]:
        return {"denoiser": self.denoiser}

    def frozen(self) -> Mapping[str, nn.Module]:
        return {} if self.reference is None else {"reference": self.reference}
