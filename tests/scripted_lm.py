"""A model for :func:`decode_blocks` that wants to write a given text, and one object of each decoding strategy."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from diffusers import BlockRefinementScheduler
from tiny_lms import MASK, VOCAB
from torch import nn

from genkit.samplers import DecodingStrategy, SchedulerStrategy, make_strategy
from genkit.samplers.blockwise import decode_blocks
from genkit.schedulers import MaskedBlockScheduler


def strategies(**options) -> dict[str, DecodingStrategy]:
    return {
        "sequential": make_strategy("sequential", **options),
        "fixed_steps": make_strategy("fixed_steps", steps=3, **options),
        "threshold": make_strategy("threshold", threshold=0.6, **options),
        "entropy_bound": make_strategy("entropy_bound", bound=1.0, **options),
        "margin": make_strategy("margin", threshold=0.3, **options),
        "random": make_strategy("random", steps=3, **options),
        "scheduler": SchedulerStrategy(MaskedBlockScheduler(threshold=0.6), steps=3, **options),
        "diffusers": SchedulerStrategy(BlockRefinementScheduler(threshold=0.6), steps=3, **options),
    }


STRATEGIES = list(strategies())


def decode(model, tokens, valid=None, **options):
    return decode_blocks(model, tokens, valid, **{"mask_token_id": MASK, "max_new_tokens": 13, **options})


@dataclass
class Script:
    """Wants to write ``text`` (B, n) with given confidence at each position; records who called it."""

    text: torch.Tensor
    confidence: torch.Tensor | float = 0.99
    shift: bool = True
    max_length: int | None = None
    mask_logit: float = 0.0
    spoil: dict[int, float] = field(default_factory=dict)  # call number → what all its logits are
    calls: list[str] = field(default_factory=list)
    blocks: list[torch.Tensor] = field(default_factory=list)

    def _logits(self, kind: str, start: int, size: int) -> torch.Tensor:
        self.calls.append(kind)
        text = nn.functional.pad(self.text, (0, 64))[:, start : start + size]
        confidence = torch.as_tensor(self.confidence).expand(self.text.shape)
        p = nn.functional.pad(confidence, (0, 64), value=0.5)[:, start : start + size].double()
        rest = ((1 - p) / (VOCAB - 2)).log()  # the mask token apart
        logits = rest.unsqueeze(-1).repeat(1, 1, VOCAB).scatter(-1, text.unsqueeze(-1), p.log().unsqueeze(-1))
        logits[..., MASK] = self.mask_logit
        number = len(self.calls) - 1
        return logits.fill_(self.spoil[number]) if number in self.spoil else logits

    def prefill(self, tokens, valid):
        return self._logits("prefill", 0, 1)[:, 0], 0

    def denoise(self, tokens, cache):
        self.blocks.append(tokens.clone())
        return self._logits("denoise", cache + self.shift, tokens.shape[1])

    def commit(self, tokens, cache):
        assert not (tokens == MASK).any()
        return self._logits("commit", cache + tokens.shape[1], 1)[:, 0], cache + tokens.shape[1]


def script(*rows: list[int], **options) -> Script:
    return Script(torch.tensor(rows), **options)


START = torch.tensor([[2, 3]])


def starts(rows: int) -> torch.Tensor:
    return START.expand(rows, 2)
