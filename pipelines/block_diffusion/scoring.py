"""Cross-entropies of chosen tokens, computed inside the network's forward pass.

Logits of a long text over a large vocabulary do not fit into memory (64 thousand positions times 150 thousand tokens),
so only the positions that a loss needs reach the output layer, in chunks that are recomputed in the backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from genkit.errors import ConfigError
from genkit.models.attention import AttentionMask, check_attention, evaluation_mode, mask_for
from genkit.pipelines.block_diffusion.masks import BlockGrid, CleanRule, NoiseRule, causal_mask, one_pass_mask

__all__ = ["TokenScorer", "check_head", "clean_losses", "grid_of", "one_pass_losses", "predicted"]

#: Logits (positions x vocabulary) held at once.
_CHUNK = 2**25


class TokenScorer(nn.Module):
    """−log p of chosen tokens under a transformers causal language model.

    Args:
        model: a causal language model that reads 4-D attention masks (checked).
        mask_token_id: the mask token; its probability is exactly 0.
    """

    def __init__(self, model: Any, mask_token_id: int) -> None:
        super().__init__()
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # a PeftModel's own network
        check_attention(model)
        check_head(model)
        self.model, self.mask_token_id = model, mask_token_id

    def forward(self, tokens: Tensor, mask: AttentionMask, positions: Tensor, index: Tensor, targets: Tensor) -> Tensor:
        """−log p(target) in nats, float32 (M,), float64 where the network is.

        Args:
            tokens: int64 (B, S), what the network reads.
            mask: who attends to whom, S x S.
            positions: int64 (B, S), position ids.
            index: int64 (M,), which of the B·S positions predict.
            targets: int64 (M,), the tokens they predict.
        """
        hidden = self.model.base_model(
            tokens, attention_mask=mask_for(self.model, mask), position_ids=positions, use_cache=False
        )[0]
        chosen = hidden.reshape(-1, hidden.shape[-1])[index]
        rows = max(_CHUNK // self.model.get_output_embeddings().weight.shape[0], 1)
        if len(chosen) <= rows:
            return self._cross_entropy(chosen, targets)
        parts = zip(chosen.split(rows), targets.split(rows), strict=True)
        return torch.cat([checkpoint(self._cross_entropy, *part, use_reentrant=False) for part in parts])

    def _cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.model.get_output_embeddings()(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        hidden_mask = torch.zeros_like(logits[:1])
        hidden_mask[:, self.mask_token_id] = -torch.inf
        return nn.functional.cross_entropy(logits + hidden_mask, targets, reduction="none")


_CHECKED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@torch.no_grad()
def check_head(model: Any) -> None:
    """Refuses a network whose logits are not its output layer of its hidden states; two passes of four tokens, once.

    Raises:
        ConfigError: scaled or capped logits (Granite, Cohere, Gemma).
    """
    if model in _CHECKED:
        return
    device = model.get_input_embeddings().weight.device
    tokens = torch.arange(4, device=device).remainder(model.config.vocab_size).unsqueeze(0)
    with evaluation_mode(model):
        logits = model(tokens, use_cache=False).logits
        own = model.get_output_embeddings()(model.base_model(tokens, use_cache=False)[0])
    if not torch.allclose(logits.float(), own.float(), rtol=2e-2, atol=1e-3 * float(logits.abs().amax()) + 1e-6):
        raise ConfigError(
            f"{type(model).__name__} changes its logits behind the output layer (scaling or capping), which scoring "
            "does not know; use llama, qwen2, qwen3 or gpt2"
        )
    _CHECKED.add(model)


def grid_of(batch: Mapping[str, Tensor], block_length: int, offset: int | Tensor | None = None) -> BlockGrid:
    """The block grid of a batch of training or evaluation.

    Args:
        batch: ``tokens`` int64 (B, L), and where there are any ``document``, ``position`` (B, L), ``response_start``
            (B,).
        block_length: tokens a block.
        offset: where the grid starts; None: at ``response_start``, as a decoder's grid does, else at 0.
    """
    tokens = batch["tokens"]
    if offset is None:
        offset = batch.get("response_start", 0)
    return BlockGrid.make(
        tokens.shape[1],
        block_length,
        offset=offset,
        document=batch.get("document"),
        position=batch.get("position"),
        device=tokens.device,
    )


def predicted(batch: Mapping[str, Tensor], grid: BlockGrid) -> Tensor:
    """Bool (B, L): the tokens that are predicted: all but padding, prompts, and a document's first token in its row."""
    wanted = grid.real & ~grid.start
    return (wanted & batch["loss_mask"]) if "loss_mask" in batch else wanted.expand_as(batch["tokens"])


def clean_losses(net: nn.Module, tokens: Tensor, grid: BlockGrid, wanted: Tensor) -> Tensor:
    """Next-token cross-entropies of the clean path alone, (B, L), 0 where ``wanted`` is False.

    Args:
        net: a `TokenScorer`, or what wraps one.
        tokens: int64 (B, L).
        grid: documents and positions.
        wanted: bool (B, L).
    """
    rows, length = tokens.shape
    index = wanted.flatten().nonzero().squeeze(1)
    losses = net(tokens, causal_mask(grid), grid.position.expand(rows, -1), index - 1, tokens.flatten()[index])
    return _scatter(losses, index, rows, length)


def one_pass_losses(
    net: nn.Module,
    tokens: Tensor,
    grid: BlockGrid,
    masked: Tensor,
    wanted: Tensor | None,
    *,
    mask_token_id: int,
    shift: bool = True,
    clean_rule: CleanRule = "causal",
    noise_rule: NoiseRule = "block",
) -> tuple[Tensor, Tensor]:
    """Cross-entropies of one pass over [x_t ; x_0]: (clean, noisy), (B, L) each, 0 where nothing is predicted.

    Args:
        net: a `TokenScorer`, or what wraps one.
        tokens: int64 (B, L), x_0.
        grid: blocks, documents and positions.
        masked: bool (B, L), the tokens that x_t hides; the noisy half predicts them.
        wanted: bool (B, L), what the clean half predicts; None: nothing.
        mask_token_id, shift: of the model.
        clean_rule, noise_rule: see :func:`one_pass_mask`.
    """
    rows, length = tokens.shape
    text = torch.cat([torch.where(masked, mask_token_id, tokens), tokens], dim=1)
    places = torch.arange(rows * length, device=tokens.device).view(rows, length)
    at = places + places // length * length  # rows of the text are twice as long as rows of tokens
    index, targets = (at - int(shift))[masked], tokens[masked]
    if wanted is not None:
        index = torch.cat([index, (at + length - 1)[wanted]])
        targets = torch.cat([targets, tokens[wanted]])
    mask = one_pass_mask(grid, clean_rule=clean_rule, noise_rule=noise_rule)
    losses = net(text, mask, grid.position_ids(rows), index, targets)
    count = len(index) if wanted is None else len(index) - int(wanted.sum())
    noisy = _scatter(losses[:count], places[masked], rows, length)
    clean = torch.zeros_like(noisy) if wanted is None else _scatter(losses[count:], places[wanted], rows, length)
    return clean, noisy


def _scatter(values: Tensor, index: Tensor, rows: int, length: int) -> Tensor:
    """``values`` (M,) at flat ``index``, zeros elsewhere, (rows, length)."""
    return values.new_zeros(rows * length).index_put((index,), values).view(rows, length)
