"""Random-mask annealing towards full-sequence masked diffusion (the DiffuLLaMA and Dream line).

Differs from its papers in: the ramp of the annealing is a share of this run's steps; the bound's weights are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from genkit._checks import checked_number
from genkit.errors import ConfigError
from genkit.models.attention import AttentionMask
from genkit.pipelines.block_diffusion.masks import PADDING
from genkit.pipelines.block_diffusion.objective import BlockDiffusionObjective, corrupt
from genkit.pipelines.block_diffusion.scoring import grid_of, predicted
from genkit.samplers.noise import Keys
from genkit.training.objective import LossOutput

__all__ = ["AnnealingObjective"]


class AnnealingObjective(BlockDiffusionObjective):
    """Masked diffusion of the whole row, with the shift, under an attention mask that opens step by step.

    Every past edge is open. Each future edge is open with probability r = min(step/(ramp · steps), 1), drawn anew for
    each step, so that at r = 0 the network is the autoregressive one and at r = 1 it attends in full. There is no
    clean half: a token costs one forward position instead of two.

    Args:
        ramp: share of the curriculum's steps until everything is open.
        Others: as for :class:`BlockDiffusionObjective` (``curriculum`` gives the steps; block sizes are not used).
    """

    def __init__(self, *args: Any, ramp: float = 0.5, ar_weight: float = 0.0, **options: Any) -> None:
        super().__init__(*args, ar_weight=ar_weight, **options)
        if self.complementary or self.clean_rule != "causal" or self.ar_weight:
            raise ConfigError(
                "annealing has no clean half and no complement; expected clean_rule='causal', complementary=False, "
                f"ar_weight=0; got {self.clean_rule!r}, {self.complementary}, {self.ar_weight}"
            )
        self.ramp = checked_number("ramp", ramp, "a share from 0 to 1", lambda value: 0.0 <= value <= 1.0)

    def open_share(self, step: int) -> float:
        """r at a step of the diffusion phase."""
        return min(step / max(self.ramp * self.curriculum.steps, 1.0), 1.0)

    def loss(self, turn: str, batch: Mapping[str, Tensor], *, step: int, keys: Keys) -> LossOutput:
        pretraining = self._phases[0].steps if self._phases and self._phases[0].name == "ar" else 0
        if step < pretraining:
            return super().loss(turn, batch, step=step, keys=keys)
        count = predicted(batch, grid_of(batch, 1)).sum().clamp(min=1)
        batch, filled = self._filled(batch, batch["tokens"].shape[1])
        tokens = batch["tokens"]
        rows, length = tokens.shape
        grid = grid_of(batch, length)
        (view,) = corrupt(
            keys,
            predicted(batch, grid) | filled,
            grid.first,
            length if "document" in batch and "response_start" not in batch else 2,  # padding is a block of its own
            t_range=self.t_range,
            weight=self.weighting,
            antithetic=False,
        )
        shared = Keys(keys.key[:1], torch.zeros_like(keys.key[:1]), keys.step)
        opened = shared.at(purpose="edges").uniform((length, length))[0] < self.open_share(step - pretraining)
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        document = grid.document
        same = (document.unsqueeze(1) == document.unsqueeze(2)) & (document != PADDING).unsqueeze(1)
        own = torch.eye(length, dtype=torch.bool, device=tokens.device)
        mask = AttentionMask.of((((causal | opened) & same) | own).unsqueeze(1))
        text = torch.where(view.masked, self.scorer.mask_token_id, tokens)
        index = view.masked.flatten().nonzero().squeeze(1)
        positions = grid.position.expand(rows, -1)
        ce = self.net("model")(text, mask, positions, index - int(self.shift), tokens.flatten()[index])
        bound = (ce * view.weight.flatten()[index]).sum() / count + 0.0 * ce.sum()
        logs = {"nelbo": bound.detach(), "masked": view.masked.sum() / count, "opened": opened.double().mean()}
        return LossOutput(bound, logs)
