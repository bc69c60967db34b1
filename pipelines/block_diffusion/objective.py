"""Training on [x_t ; x_0] in one pass: block diffusion with the shift, and the next-token loss of the clean half.

Differs from the paper in: the weights of the losses, the noise schedule's range and the block schedule are not
published, so they are options; the first token of each block is never noised and is scored by the clean path, which we
infer from the released decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from genkit._checks import checked_count, checked_number
from genkit.errors import ConfigError
from genkit.pipelines.block_diffusion.curriculum import BlockCurriculum
from genkit.pipelines.block_diffusion.masks import PADDING, BlockGrid, CleanRule
from genkit.pipelines.block_diffusion.scoring import (
    TokenScorer,
    clean_losses,
    grid_of,
    one_pass_losses,
    predicted,
)
from genkit.samplers.noise import Keys
from genkit.training.objective import LossOutput, Objective, Phase

__all__ = [
    "BlockDiffusionObjective",
    "Corruption",
    "LossWeight",
    "corrupt",
    "mask_times",
    "masked_ranks",
]

LossWeight = Literal["1/t", "1/k", "none"]


@dataclass(frozen=True)
class Corruption:
    """Which tokens are masked (bool (B, L)), and the weight of each one's loss (float32 (B, L))."""

    masked: Tensor
    weight: Tensor


def mask_times(keys: Keys, blocks: int, t_range: tuple[float, float], antithetic: bool) -> Tensor:
    """One t per block, float64 (B, blocks), uniform on ``t_range``.

    ``antithetic``: the blocks of a row take one t from each of ``blocks`` equal strata, in random order, so their mean
    varies less; each t alone is still uniform.
    """
    uniform = keys.at(purpose="time").uniform((blocks,))
    if antithetic:
        uniform = (keys.at(purpose="strata").uniform((blocks,)).argsort(dim=1) + uniform) / blocks
    low, high = t_range
    return low + (high - low) * uniform


def masked_ranks(keys: Keys, maskable: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Each maskable token's place in a random order of its block's maskable tokens, and how many these are.

    Args:
        keys: the rows' streams.
        maskable: bool (B, L).
        first: bool (B or 1, L), True where a block starts.

    Returns:
        ranks int64 (B, L) from 0 (L where not maskable), and counts n int64 (B, L).
    """
    rows, length = maskable.shape
    first = first.expand(rows, -1)
    block = first.long().cumsum(dim=1) - 1
    order = keys.uniform((length,)) + 2.0 * (~maskable) + 4.0 * block
    ranks = order.argsort(dim=1).argsort(dim=1)
    index = torch.arange(length, device=maskable.device).expand(rows, -1)
    start = torch.where(first, index, 0).cummax(dim=1).values
    counts = torch.zeros_like(block).scatter_add(1, block, maskable.long()).gather(1, block)
    return torch.where(maskable, ranks - start, length), counts


def corrupt(
    keys: Keys,
    maskable: Tensor,
    first: Tensor,
    blocks: int,
    *,
    t_range: tuple[float, float] = (1e-3, 1.0),
    weight: LossWeight = "1/t",
    antithetic: bool = True,
    complementary: bool = False,
) -> list[Corruption]:
    """Masks maskable tokens, block by block.

    ``"1/t"`` and ``"none"``: each token with its block's probability t. ``"1/k"``: k of the block's n maskable tokens,
    k even on 1 … n. The sums Σ_masked CE/t and Σ_masked CE·n/k have the same expectation, the second without the
    variance of the random number of masks and with weights of at most n (``nelbo``'s identity).

    Args:
        keys: the rows' noise streams: the result depends on (seed, step, sample) alone.
        maskable: bool (B, L).
        first: bool (B or 1, L), True where a block starts.
        blocks: how many times t a row draws; where many short documents make more blocks, some share one.
        t_range: t is uniform on it; anything but (0, 1] biases the bound (not used by ``"1/k"``).
        weight: ``"1/t"`` or ``"1/k"``: unbiased estimates of the bound; ``"none"`` counts masked tokens alike.
        antithetic: see :func:`mask_times`.
        complementary: also the complement, which has the same law: the tokens that the first view left.

    Returns:
        One corruption, or two.
    """
    block = first.expand_as(maskable).long().cumsum(dim=1) - 1
    if weight == "1/k":
        return _corrupt_counts(keys, maskable, first, block, blocks, antithetic, complementary)
    t = mask_times(keys, blocks, t_range, antithetic).gather(1, block % blocks)
    masked = (keys.at(purpose="mask").uniform((block.shape[1],)) < t) & maskable
    views = [(masked, t), (maskable & ~masked, (1.0 - t).clamp(min=t_range[0]))][: 1 + complementary]
    return [Corruption(m, (1.0 / rate if weight == "1/t" else torch.ones_like(rate)).float()) for m, rate in views]


def _corrupt_counts(
    keys: Keys,
    maskable: Tensor,
    first: Tensor,
    block: Tensor,
    blocks: int,
    antithetic: bool,
    complementary: bool,
) -> list[Corruption]:
    ranks, n = masked_ranks(keys.at(purpose="mask"), maskable, first)
    uniform = mask_times(keys, blocks, (0.0, 1.0), antithetic).gather(1, block % blocks)
    if not complementary:
        k = (uniform * n).long() + 1
        return [Corruption(ranks < k, (n / k).float())]
    k = (uniform * (n + 1)).long()  # 0 … n, so that n − k has the same law
    views = [(ranks < k, k), (maskable & (ranks >= k), n - k)]
    return [Corruption(masked, ((n + 1) / count.clamp(min=1)).float()) for masked, count in views]


class BlockDiffusionObjective(Objective):
    """Cross-entropies of one pass over [x_t ; x_0], per predicted token::

        L = 1/N Σ_i  [i first of its block]  CE_clean(i)
                   + [i masked]              CE_noisy(i)/t
                   + [i not first]           λ CE_clean(i)

    The first two sums are an estimate of the likelihood bound −log p(x) ≤ Σ_b (−log p(x_1^b | x^{<b}) + L_BD^b); the
    third is the auxiliary autoregressive loss on the other tokens. So at block length 1 the loss *is* the
    autoregressive one, whatever λ. N counts the predicted tokens of all micro-batches and processes.

    Args:
        model: a causal language model of transformers; its parameters with ``requires_grad`` are trained.
        mask_token_id: the mask token.
        curriculum: block length at each step.
        ar_weight: λ.
        shift: the logit of position i − 1 predicts token i; the first token of a block comes from the clean path.
            False: every token is predicted at its own position (no clean term, unless ``ar_weight`` > 0).
        clean_rule: ``"causal"``, or ``"block"`` (the clean half of BD3LM's followers; a next-token loss would leak).
        t_range, weight, antithetic: see :func:`corrupt`.
        complementary: also train on the complement of each mask, in the same batch (twice the noisy passes).
        random_offset: shift the block grid by a random amount each step, so that any position can start a block.
            Batches with ``response_start`` put the grid there instead.
        fill_token_id: in batches with ``response_start``, the end token that fills a response's last block behind its
            end. A decoder sees whole blocks, so the network must have seen masks there and learned to end them; these
            tokens enter the noisy half's loss, but are not counted in N.
        phases: the training phases, if there are several; a phase called ``"ar"`` is plain next-token training.
        skip_clean_only: at block length 1 leave out the noisy half, which has nothing to predict there.

    Raises:
        ConfigError: options that exclude each other.

    Batches hold ``tokens`` int64 (B, L) and, where there is padding, packing or a prompt, ``document`` int64 (B, L) (−1
    is padding), ``position``, ``loss_mask`` bool (B, L), ``response_start`` int64 (B,).
    """

    def __init__(
        self,
        model: nn.Module,
        mask_token_id: int,
        curriculum: BlockCurriculum,
        *,
        ar_weight: float = 0.5,
        shift: bool = True,
        clean_rule: CleanRule = "causal",
        t_range: tuple[float, float] = (1e-3, 1.0),
        weight: LossWeight = "1/k",
        antithetic: bool = True,
        complementary: bool = False,
        random_offset: bool = True,
        fill_token_id: int | None = None,
        phases: Sequence[Phase] = (),
        skip_clean_only: bool = True,
    ) -> None:
        checked_number("ar_weight", ar_weight, "a number, at least 0", lambda value: value >= 0.0)
        if clean_rule == "block" and (ar_weight > 0 or shift):
            raise ConfigError(
                "clean_rule='block' shows clean tokens their successors, so next-token losses on the clean half would "
                f"leak; got ar_weight={ar_weight}, shift={shift}: use clean_rule='causal', or ar_weight=0, shift=False"
            )
        if weight not in get_args(LossWeight):
            raise ConfigError(f"weight={weight!r}; expected one of {', '.join(get_args(LossWeight))}")
        low, high = t_range
        if not 0.0 < low < high <= 1.0:
            raise ConfigError(f"t_range={t_range}; expected 0 < low < high ≤ 1")
        self.scorer = TokenScorer(model, checked_count("mask_token_id", mask_token_id, "a token id", 0))
        self.curriculum, self.ar_weight, self.shift, self.clean_rule = curriculum, ar_weight, shift, clean_rule
        self.t_range, self.weighting, self.antithetic = (low, high), weight, antithetic
        self.complementary, self.random_offset, self.skip_clean_only = complementary, random_offset, skip_clean_only
        self.fill_token_id, self._phases = fill_token_id, tuple(phases)

    def phases(self) -> Sequence[Phase]:
        return self._phases

    def networks(self) -> Mapping[str, nn.Module]:
        return {"model": self.scorer}

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        """The number of predicted tokens."""
        return float(predicted(batch, grid_of(batch, 1)).sum())

    def loss(self, turn: str, batch: Mapping[str, Tensor], *, step: int, keys: Keys) -> LossOutput:
        block_length, offset = self._blocks(step, batch, keys)
        count = predicted(batch, grid_of(batch, block_length)).sum().clamp(min=1)
        blocks = self._most_blocks(batch, block_length)
        batch, filled = self._filled(batch, block_length)
        grid = grid_of(batch, block_length, offset)
        wanted = predicted(batch, grid)
        maskable = (wanted | filled) & ~grid.first if self.shift else wanted | filled
        if block_length == 1 and self.shift and self.skip_clean_only:
            clean = clean_losses(self.net("model"), batch["tokens"], grid, wanted)
            return self._output(clean, torch.zeros_like(clean), grid.first, wanted, count, block_length)
        views = corrupt(
            keys,
            maskable,
            grid.first,
            blocks,
            t_range=self.t_range,
            weight=self.weighting,
            antithetic=self.antithetic,
            complementary=self.complementary,
        )
        clean, noisy = self._one_pass(batch["tokens"], grid, wanted, views)
        return self._output(clean, noisy, grid.first, wanted, count, block_length, views[0].masked)

    def _blocks(self, step: int, batch: Mapping[str, Tensor], keys: Keys) -> tuple[int, int | Tensor]:
        """This step's block length and offset: functions of (seed, step), alike on all processes."""
        if self._phases and self._phases[0].name == "ar":
            if step < self._phases[0].steps:
                return 1, 0
            step -= self._phases[0].steps
        shared = Keys(keys.key[:1], torch.zeros_like(keys.key[:1]), keys.step)
        mixing, where = shared.at(purpose="grid").uniform((2,))[0].tolist()
        block_length = self.curriculum.block_length(step, mixing)
        if "response_start" in batch:
            return block_length, batch["response_start"]
        return block_length, int(where * block_length) if self.random_offset else 0

    def _most_blocks(self, batch: Mapping[str, Tensor], block_length: int) -> int:
        """How many blocks a row can have, padding's own included: from the data's row length, not from the longest
        response of this batch, so that a sample's masks do not depend on its batch."""
        length = batch["tokens"].shape[1]
        if "response_start" in batch:
            return length // block_length + 5
        return min(length // block_length + 2, length)

    def _filled(self, batch: Mapping[str, Tensor], block_length: int) -> tuple[Mapping[str, Tensor], Tensor]:
        """The batch with each response's last block filled up, and which tokens (B, L) that are."""
        tokens = batch["tokens"]
        if self.fill_token_id is None or "response_start" not in batch or block_length == 1:
            return batch, torch.zeros_like(tokens, dtype=torch.bool)
        start = batch["response_start"].unsqueeze(1)
        batch = {"document": torch.zeros_like(tokens), **batch}
        ends = (batch["document"] != PADDING).sum(dim=1, keepdim=True)
        filled_ends = start + -(-(ends - start) // block_length) * block_length
        if block_length >= tokens.shape[1]:  # one block of everything ends with the row
            filled_ends = torch.full_like(ends, tokens.shape[1])
        length = int(filled_ends.max())
        place = torch.arange(length, device=tokens.device)
        filled = (place >= ends) & (place < filled_ends)
        fill = {"tokens": self.fill_token_id, "document": 0, "loss_mask": False}
        wide = {
            name: torch.where(filled, value, _resized(batch[name], length, PADDING if name == "document" else 0))
            for name, value in fill.items()
        }
        return {**batch, **wide}, filled

    def _one_pass(
        self, tokens: Tensor, grid: BlockGrid, wanted: Tensor, views: Sequence[Corruption]
    ) -> tuple[Tensor, Tensor]:
        """Clean and weighted noisy cross-entropies, (B, L) each; complementary views are further rows of the pass."""
        rows, copies = len(tokens), len(views)
        masked, weight = torch.cat([v.masked for v in views]), torch.cat([v.weight for v in views])
        scored = torch.cat([wanted, torch.zeros_like(wanted).repeat(copies - 1, 1)]) if copies > 1 else wanted
        clean, noisy = one_pass_losses(
            self.net("model"),
            tokens.repeat(copies, 1),
            grid.repeat(copies),
            masked,
            scored if self.clean_rule == "causal" else None,
            mask_token_id=self.scorer.mask_token_id,
            shift=self.shift,
            clean_rule=self.clean_rule,
        )
        return clean[:rows], (noisy * weight).view(copies, rows, -1).sum(dim=0) / copies

    def _output(
        self,
        clean: Tensor,
        noisy: Tensor,
        first: Tensor,
        wanted: Tensor,
        count: Tensor,
        block_length: int,
        masked: Tensor | None = None,
    ) -> LossOutput:
        first = first if self.shift else torch.zeros_like(first)
        bound = (torch.where(first & wanted, clean, 0.0) + noisy).sum() / count
        rest = torch.where(first, 0.0, clean).sum() / count
        logs: dict[str, Any] = {
            "nelbo": bound.detach(),
            "masked": 0.0 if masked is None else masked.sum() / count,
            "block_length": float(block_length),
        }
        if self.clean_rule == "causal":
            logs["ar_nll"] = clean.detach().sum() / count
        return LossOutput(bound + self.ar_weight * rest if self.ar_weight else bound, logs)


def _resized(x: Tensor, length: int, value: int) -> Tensor:
    """Rows cut or padded on the right to ``length``."""
    return nn.functional.pad(x[:, :length], (0, max(length - x.shape[1], 0)), value=value)
