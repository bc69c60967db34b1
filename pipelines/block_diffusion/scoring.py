"""Cross-entropies of chosen tokens, computed inside the network's forward pass.

Logits of a long text over a large vocabulary do not fit into memory (64 thousand positions times 150 thousand tokens),
so only the positions that a loss needs reach the output layer, in chunks that are recomputed in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from genkit.models.attention import AttentionMask, check_attention, mask_for

__all__ = ["TokenScorer"]

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
