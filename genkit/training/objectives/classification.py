"""Cross entropy of a classifier of images, with shifts and mirror images drawn from keyed streams."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from genkit._checks import checked_count, checked_number, got
from genkit.errors import ConfigError, nearest
from genkit.samplers.noise import Keys
from genkit.training.objective import LossOutput, Objective

__all__ = ["ClassificationObjective", "shifted"]


class ClassificationObjective(Objective):
    r"""Trains ``network`` on −log p(y | x), smoothed: the target has 1 − ε + ε/K at y and ε/K elsewhere.

    A batch holds ``sample``, images (B, C, H, W), and the labels, integers (B,). How an image is moved is a function of
    (seed, step, sample id) alone: purposes ``"shift"`` and ``"flip"`` of its streams.

    Logs: ``accuracy``, the share of the micro-batch's (moved) images whose largest logit is that of their label.

    Args:
        network: (B, C, H, W) → logits (B, K); what is trained, under the name ``"network"``.
        label: the batch's entry with the labels, 0 to K-1.
        label_smoothing: ε in [0, 1).
        shift: each image is moved by a whole number of pixels, uniform on −shift … shift in both directions; what comes
            in from outside repeats the border.
        flip: mirror left and right with probability ½.

    Raises:
        ConfigError: an option outside its range; a batch without its entries, or with labels that are no integers.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        label: str = "class_labels",
        label_smoothing: float = 0.0,
        shift: int = 0,
        flip: bool = False,
    ) -> None:
        self.network, self.label, self.flip = network, label, flip
        self.label_smoothing = checked_number(
            "label_smoothing", label_smoothing, "a number in [0, 1)", lambda v: 0.0 <= v < 1.0
        )
        self.shift = checked_count("shift", shift, "whole pixels, at least 0", 0)

    def networks(self) -> Mapping[str, nn.Module]:
        return {"network": self.network}

    def loss(self, turn: str, batch: Mapping[str, Tensor], *, step: int, keys: Keys) -> LossOutput:
        images, labels = self._read(batch)
        logits = self.net("network")(self.augmented(images, keys))
        loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        right = (logits.detach().argmax(dim=1) == labels).to(torch.float32)
        return LossOutput(loss, {"accuracy": right.mean()})

    def augmented(self, images: Tensor, keys: Keys) -> Tensor:
        """The images (B, C, H, W) as the network sees them in the step of ``keys``."""
        if self.shift:
            moves = (keys.at(purpose="shift").uniform((2,)) * (2 * self.shift + 1)).floor().long() - self.shift
            images = shifted(images, moves)
        if self.flip:
            mirrored = keys.at(purpose="flip").uniform() < 0.5
            images = torch.where(mirrored.reshape(-1, 1, 1, 1), images.flip(-1), images)
        return images

    def _read(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        for name in ("sample", self.label):
            if name not in batch:
                raise ConfigError(
                    f"a batch has {', '.join(batch)}; expected {name!r} too (label= names the labels)."
                    f"{nearest(name, batch)}"
                )
        images, labels = batch["sample"], batch[self.label]
        if images.ndim != 4:
            raise ConfigError(f"sample has {got(images)}; expected images (B, C, H, W)")
        if labels.is_floating_point() or labels.shape != images.shape[:1]:
            raise ConfigError(
                f"{self.label} has {got(labels)}, {labels.dtype}; expected integers ({len(images)},), one an image"
            )
        return images, labels.long()


def shifted(images: Tensor, moves: Tensor) -> Tensor:
    """Images moved by whole pixels; what comes in from outside repeats the border.

    Args:
        images: (B, C, H, W).
        moves: int64 (B, 2), pixels down and to the right.
    """
    height, width = images.shape[-2:]
    y, x = (torch.arange(size, device=images.device) for size in (height, width))
    rows = (y - moves[:, :1]).clamp(0, height - 1)
    columns = (x - moves[:, 1:]).clamp(0, width - 1)
    batch = torch.arange(len(images), device=images.device).reshape(-1, 1, 1)
    return images.movedim(1, -1)[batch, rows.unsqueeze(2), columns.unsqueeze(1)].movedim(-1, 1)
