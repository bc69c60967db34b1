"""The likelihood bound of block diffusion, per token, by the exact 1/k weights.

For a block with n maskable tokens, integrating t away gives

    ∫ dt (1/t) E_masks Σ_masked CE  =  Σ_{k=1..n} (1/k) E_{|S|=k} Σ_{j ∈ S} CE_j,

since C(n, k) ∫ t^{k−1} (1−t)^{n−k} dt = 1/k. So the evaluation draws *how many* tokens are masked evenly and carries no
variance from t.

Differs from the paper in: its evaluation is not published.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from genkit._checks import checked_count
from genkit.errors import ConfigError
from genkit.models.attention import evaluation_mode
from genkit.pipelines.block_diffusion.masks import BlockGrid, CleanRule, NoiseRule
from genkit.pipelines.block_diffusion.objective import masked_ranks
from genkit.pipelines.block_diffusion.scoring import TokenScorer, clean_losses, grid_of, one_pass_losses, predicted
from genkit.samplers.noise import Keys, training_keys

__all__ = ["LikelihoodBound", "PerToken", "ar_nll", "nelbo"]


@dataclass(frozen=True)
class PerToken:
    """A mean in nats per token with the half-width of its 95 % interval over rows of text."""

    value: float
    half_width: float
    tokens: int


@dataclass(frozen=True)
class LikelihoodBound:
    """``nelbo``: the bound −log p ≤; ``ar_nll``: the clean path's exact next-token loss on the same tokens."""

    nelbo: PerToken
    ar_nll: PerToken
    block_length: int

    @property
    def gap(self) -> float:
        """nelbo/ar_nll − 1."""
        return self.nelbo.value / self.ar_nll.value - 1.0


@torch.no_grad()
def nelbo(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    mask_token_id: int,
    block_length: int,
    shift: bool = True,
    clean_rule: CleanRule = "causal",
    noise_rule: NoiseRule = "block",
    offset: int | Tensor | None = None,
    draws: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
) -> LikelihoodBound:
    """The bound of ``model`` on rows of text, and its next-token loss on the same tokens.

    Args:
        model: a causal language model of transformers.
        batch: ``tokens`` int64 (B, L), and ``document``, ``position``, ``loss_mask``, ``response_start`` as in
            training.
        mask_token_id: the mask token.
        block_length: tokens a block; 1 gives the next-token loss itself.
        shift, clean_rule, noise_rule: how the model was trained (:func:`one_pass_mask`). ``noise_rule="full"`` with a
            block of the whole row is masked diffusion.
        offset: where the grid starts; None: at each row's ``response_start`` where the batch has it, else at 0.
        draws: passes over the text; each masks another number k of tokens in each block. None: one for every k, after
            which only the choice of the k tokens is random.
        batch_size: rows a pass.
        seed: key of the masks.

    Returns:
        Both in nats per predicted token, with 95 % intervals over rows. With ``shift=False`` or a full ``noise_rule``
        the model has no clean path; ``ar_nll`` then is what its causal pass gives, for comparison.

    Raises:
        ConfigError: no predicted token.
    """
    scorer = TokenScorer(model, mask_token_id)
    tokens = batch["tokens"]
    grid = grid_of(batch, block_length, offset)
    wanted = predicted(batch, grid)
    if not bool(wanted.any()):
        raise ConfigError("the batch holds no predicted token; expected rows of at least two tokens, or a loss_mask")
    sums, clean_sums = [], []
    with evaluation_mode(model):
        for start in range(0, len(tokens), batch_size):
            part = {k: v[start : start + batch_size] for k, v in batch.items()}
            where = offset[start : start + batch_size] if isinstance(offset, Tensor) else offset
            view = _View(scorer, part, grid_of(part, block_length, where), shift, clean_rule, noise_rule)
            ids = torch.arange(start, start + len(part["tokens"]), device=tokens.device)
            bound, clean = view.sums(ids, seed, draws)
            sums.append(bound)
            clean_sums.append(clean)
    counts = wanted.sum(dim=1)
    return LikelihoodBound(_per_token(torch.cat(sums), counts), _per_token(torch.cat(clean_sums), counts), block_length)


def ar_nll(model: nn.Module, batch: Mapping[str, Tensor], *, mask_token_id: int, batch_size: int = 32) -> PerToken:
    """The next-token loss of the causal path, nats per predicted token."""
    return nelbo(model, batch, mask_token_id=mask_token_id, block_length=1, batch_size=batch_size).ar_nll


@dataclass(frozen=True)
class _View:
    """A few rows of text, and how they are scored."""

    scorer: TokenScorer
    batch: Mapping[str, Tensor]
    grid: BlockGrid
    shift: bool
    clean_rule: CleanRule
    noise_rule: NoiseRule

    def sums(self, ids: Tensor, seed: int, draws: int | None) -> tuple[Tensor, Tensor]:
        """Bound and next-token loss of each row, float64 (B,) each."""
        wanted = predicted(self.batch, self.grid)
        clean = clean_losses(self.scorer, self.batch["tokens"], self.grid, wanted).double()
        first = self.grid.first.expand_as(wanted)
        maskable = wanted & ~first if self.shift else wanted
        bound = (clean * (first & wanted)).sum(dim=1) if self.shift else torch.zeros_like(clean[:, 0])
        largest = int(masked_ranks(training_keys(seed, 0, ids), maskable, first)[1].max())
        if not largest:
            return bound, clean.sum(dim=1)
        passes = largest if draws is None else checked_count("draws", draws)
        for i in range(passes):
            masked, weight = self._masks(training_keys(seed, i, ids), maskable, first, i, draws is None)
            bound = bound + (self._noisy(masked) * weight).sum(dim=1) * (1.0 if draws is None else 1.0 / passes)
        return bound, clean.sum(dim=1)

    def _masks(self, keys: Keys, maskable: Tensor, first: Tensor, i: int, sweep: bool) -> tuple[Tensor, Tensor]:
        """Pass i: which tokens are masked, and their weights (1/k in a sweep, n/k for an evenly drawn k)."""
        ranks, n = masked_ranks(keys.at(purpose="mask"), maskable, first)
        if sweep:
            k = torch.full_like(n, i + 1)
            masked = (ranks < k) & (k <= n)
            return masked, masked / k.double()
        block = first.long().cumsum(dim=1) - 1
        start = keys.at(step=0, purpose="count").uniform((first.shape[1],)).gather(1, block)
        k = ((start * n).long() + i) % n.clamp(min=1) + 1
        masked = ranks < k
        return masked, masked * (n / k.double())

    def _noisy(self, masked: Tensor) -> Tensor:
        """CE of the masked tokens, float64 (B, L), 0 elsewhere."""
        return one_pass_losses(
            self.scorer,
            self.batch["tokens"],
            self.grid,
            masked,
            None,
            mask_token_id=self.scorer.mask_token_id,
            shift=self.shift,
            clean_rule=self.clean_rule,
            noise_rule=self.noise_rule,
        )[1].double()


def _per_token(sums: Tensor, counts: Tensor) -> PerToken:
    """Ratio of sums over rows; its interval from the rows' deviations."""
    counts = counts.double()
    total = counts.sum()
    mean = sums.sum() / total
    rows = len(sums)
    spread = (sums - mean * counts).square().sum() * rows / max(rows - 1, 1)
    half = 1.96 * math.sqrt(float(spread)) / float(total) if rows > 1 else math.nan
    return PerToken(float(mean), half, int(total))
