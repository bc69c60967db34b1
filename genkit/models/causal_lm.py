"""Language models of transformers as the samplers see them: a cache is an argument and a return value.

``prefill`` reads the prompts, ``denoise`` looks at a block without storing anything, ``commit`` stores finished tokens.
With the causal rule the cache holds, after every commit, exactly what an autoregressive model would have cached.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from genkit._checks import checked_count
from genkit.errors import ConfigError
from genkit.models.attention import AttentionMask, check_attention, mask_for

__all__ = ["CachedCausalLM", "CachedModel", "ContextRule", "KeyValueCache", "TokenContext", "UncachedCausalLM"]

ContextRule = Literal["causal", "block", "full"]


class CachedModel(Protocol):
    """What :func:`genkit.samplers.decode_blocks` needs of a model. Logits are (B, …, V); V counts the mask token.
    They belong to the caller, who writes into them.

    Attributes:
        shift: the logit at a position predicts the *next* token (as in an autoregressive model), else its own.
        max_length: how many tokens a row may have in all, or None where nothing limits it.
    """

    shift: bool
    max_length: int | None

    def prefill(self, tokens: Tensor, valid: Tensor) -> tuple[Tensor, Any]:
        """Reads prompts, int64 (B, L) with left padding where ``valid`` (B, L) is False → last logits (B, V), cache."""

    def denoise(self, tokens: Tensor, cache: Any) -> Tensor:
        """Logits (B, n, V) of a partly masked block (B, n) that sees itself and the context; the cache stays."""

    def commit(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Appends finished tokens (B, n) to the context → the last position's logits (B, V), cache."""


class KeyValueCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """Keys and values of the committed tokens, in buffers that grow by doubling.

    A pass always writes its keys and values behind the ``length`` committed ones; only a commit moves ``length``, so a
    denoising pass costs no copy and leaves no trace. A cache belongs to one line of text: two different
    continuations of the same object would overwrite each other.

    Attributes:
        length: committed slots, left padding included.
        valid: bool (B, prompt), False where a prompt is padded; what comes behind the prompts is not.
        padded: whether any prompt is.
    """

    def __init__(self, valid: Tensor) -> None:
        super().__init__(layers=[])
        self.length = 0
        self.valid, self.padded = valid, not bool(valid.all())
        self.padding = (~valid).sum(dim=1, keepdim=True)
        self.inputs: dict[str, tuple[Any, Tensor]] = {}  # mask and positions of the passes over the present block
        self._buffers: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each attention layer: (B, H, n, D) → all keys and values (B, H, length + n, D)."""
        end = self.length + key_states.shape[2]
        if layer_idx == len(self._buffers):
            self._buffers.append(key_states.new_empty(2, *key_states.shape[:2], 0, key_states.shape[3]))
        buffer = self._buffers[layer_idx]
        if end > buffer.shape[3]:
            grown = buffer.new_empty(*buffer.shape[:3], max(2 * buffer.shape[3], end, 64), buffer.shape[4])
            grown[:, :, :, : self.length] = buffer[:, :, :, : self.length]
            buffer = self._buffers[layer_idx] = grown
        buffer[0, :, :, self.length : end] = key_states
        buffer[1, :, :, self.length : end] = value_states
        return buffer[0, :, :, :end], buffer[1, :, :, :end]

    def committed(self, count: int) -> KeyValueCache:
        """The cache with the ``count`` slots that the last pass wrote counted in."""
        result: KeyValueCache = copy.copy(self)
        result.length, result.inputs, result._buffers = self.length + count, {}, list(self._buffers)
        return result

    def positions(self, count: int) -> Tensor:
        """Position ids of the next ``count`` tokens, int64 (B or 1, count); padding does not count."""
        slots = torch.arange(self.length, self.length + count, device=self.valid.device).unsqueeze(0)
        return slots - self.padding if self.padded else slots

    def visible(self, count: int, causal: bool) -> Tensor:
        """What the next ``count`` tokens see: the context and themselves, bool (B or 1, 1, count, length + count)."""
        keys = self.length + count
        if self.padded:
            behind = self.valid.new_ones(len(self.valid), keys - self.valid.shape[1])
            dense = torch.cat([self.valid, behind], dim=1)[:, None, None].repeat(1, 1, count, 1)
        else:
            dense = self.valid.new_ones(1, 1, count, keys)
        if causal and count > 1:
            dense[..., self.length :] = dense.new_ones(count, count).tril_()
        return dense

    def filled(self, count: int) -> bool:
        """Whether some layer has written ``count`` slots behind the committed ones."""
        return any(buffer.shape[3] >= self.length + count for buffer in self._buffers)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Committed keys and values of one layer, (B, H, length, D) each."""
        keys, values = self._buffers[index][:, :, :, : self.length]
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed slots."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of keys that ``query_length`` new queries meet, and the first one's index."""
        return self.length + int(query_length), 0


class _Adapter:
    """What the cached and the uncached model share: checks, the call, and who sees whom."""

    def __init__(self, model: nn.Module, rule: ContextRule, shift: bool, block_length: int | None) -> None:
        if rule not in get_args(ContextRule):
            raise ConfigError(f"rule={rule!r}; expected one of {', '.join(get_args(ContextRule))}")
        if rule == "block" and block_length is None:
            raise ConfigError("rule='block' needs block_length: the prompt's grid ends where the prompt ends")
        block_length = 1 if block_length is None else checked_count("block_length", block_length)
        check_attention(model)
        self.model, self.rule, self.shift, self.block_length = model, rule, shift, block_length
        self.max_length = getattr(model.config, "max_position_embeddings", None)
        self.vocab_size: int | None = getattr(model.config, "vocab_size", None)

    def _call(self, tokens: Tensor, mask: Any, positions: Tensor, keep: int, **cache: KeyValueCache) -> Tensor:
        output = self.model(
            tokens, attention_mask=mask, position_ids=positions, use_cache=bool(cache), logits_to_keep=keep, **cache
        )
        logits: Tensor = output.logits
        return logits[:, -keep:]  # all of them for keep = 0; some networks return more than they are asked for

    def _check_block(self, tokens: Tensor) -> None:
        if self.rule == "block" and tokens.shape[1] != self.block_length:
            raise ConfigError(
                f"a block of {tokens.shape[1]} tokens is committed, but with rule='block' the grid has block_length="
                f"{self.block_length}; decode with the block length that the model was given"
            )

    def _among_context(self, length: int, device: torch.device) -> Tensor:
        """Bool (length, length): a context of ``length`` tokens under this rule."""
        q, k = torch.arange(length, device=device).unsqueeze(1), torch.arange(length, device=device)
        if self.rule == "block":
            return (k - length) // self.block_length <= (q - length) // self.block_length
        return k <= q if self.rule == "causal" else (k == k) & (q == q)


_CACHE_ARGUMENTS: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def _cache_argument(model: nn.Module) -> str:
    """``cache`` since transformers 5.2x, ``past_key_values`` before; of the network inside, where one is wrapped."""
    if model in _CACHE_ARGUMENTS:
        return _CACHE_ARGUMENTS[model]
    for module in model.modules():
        names = inspect.signature(module.forward).parameters
        for name in ("cache", "past_key_values"):
            if name in names:
                return _CACHE_ARGUMENTS.setdefault(model, name)
    raise ConfigError(f"{type(model).__name__} takes no cache; use UncachedCausalLM")


def _with_padding(dense: Tensor, valid: Tensor) -> Tensor:
    """Bool (Q, K) and the keys' validity (B, K) → (B or 1, 1, Q, K); a query always sees itself."""
    queries, keys = dense.shape
    own = torch.eye(keys, dtype=torch.bool, device=dense.device)[keys - queries :]
    return ((dense & valid.unsqueeze(1)) | own).unsqueeze(1)


def _position_ids(valid: Tensor) -> Tensor:
    """Positions that do not count left padding, int64 (B, L)."""
    return (valid.cumsum(1) - 1).clamp(min=0)


class CachedCausalLM(_Adapter):
    """A transformers model with an exact key-value cache; its passes keep no gradients.

    Args:
        model: a causal language model that reads 4-D attention masks (checked, see
            :func:`genkit.models.attention.check_attention`).
        rule: how committed tokens see each other: ``"causal"``, or ``"block"`` for block-causal models.
        shift: see :class:`CachedModel`.
        block_length: of the grid, for ``rule="block"``.

    Raises:
        ConfigError: a model that ignores masks; ``rule="full"`` (no cache is exact there).
    """

    def __init__(
        self, model: nn.Module, *, rule: ContextRule = "causal", shift: bool = True, block_length: int | None = None
    ) -> None:
        if rule == "full":
            raise ConfigError(
                "rule='full' lets committed tokens see later ones, so no cache is exact; use UncachedCausalLM"
            )
        super().__init__(model, rule, shift, block_length)
        self._cache_argument = _cache_argument(model)

    @torch.no_grad()
    def prefill(self, tokens: Tensor, valid: Tensor) -> tuple[Tensor, KeyValueCache]:
        """See :meth:`CachedModel.prefill`."""
        cache = KeyValueCache(valid)
        dense = _with_padding(self._among_context(tokens.shape[1], tokens.device), valid)
        mask = mask_for(self.model, AttentionMask.of(dense))
        logits = self._call(tokens, mask, _position_ids(valid), 1, **{self._cache_argument: cache})
        if not cache.filled(tokens.shape[1]):
            raise ConfigError(
                f"{type(self.model).__name__} stored no keys (gradient checkpointing does that in training mode); call "
                "model.eval() first"
            )
        return logits[:, -1], cache.committed(tokens.shape[1])

    @torch.no_grad()
    def denoise(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """See :meth:`CachedModel.denoise`."""
        mask, positions = self._inputs("block", tokens.shape[1], cache)
        return self._call(tokens, mask, positions, 0, **{self._cache_argument: cache})

    @torch.no_grad()
    def commit(self, tokens: Tensor, cache: KeyValueCache) -> tuple[Tensor, KeyValueCache]:
        """See :meth:`CachedModel.commit`."""
        self._check_block(tokens)
        mask, positions = self._inputs(self.rule, tokens.shape[1], cache)
        logits = self._call(tokens, mask, positions, 1, **{self._cache_argument: cache})
        return logits[:, -1], cache.committed(tokens.shape[1])

    def _inputs(self, rule: str, count: int, cache: KeyValueCache) -> tuple[Any, Tensor]:
        """Mask and positions of ``count`` tokens behind the context; made once a block."""
        key = f"{rule} {count}"
        if key not in cache.inputs:
            mask = mask_for(self.model, AttentionMask.of(cache.visible(count, rule == "causal")))
            cache.inputs[key] = (mask, cache.positions(count))
        return cache.inputs[key]


@dataclass(frozen=True)
class TokenContext:
    """The "cache" of a model without one: the tokens themselves (B, L), and which of them are no padding."""

    tokens: Tensor
    valid: Tensor


class UncachedCausalLM(_Adapter):
    """The same model without a cache: every pass reads the whole text again. For models that attend in full, and as
    the reference that the cached one must equal.

    Args:
        model: as for :class:`CachedCausalLM`.
        rule: ``"causal"``, ``"block"`` or ``"full"`` (every token sees every token, masked ones included; nothing is
            predicted by the context alone, so all tokens of a block start as masks, with the shift too).
        shift: see :class:`CachedModel`.
        block_length: of the grid, for ``rule="block"``.
    """

    def __init__(
        self, model: nn.Module, *, rule: ContextRule = "causal", shift: bool = True, block_length: int | None = None
    ) -> None:
        super().__init__(model, rule, shift, block_length)
        self._from_left = shift and rule == "full"
        if self._from_left:  # every position of a block is masked and predicted by its left neighbour
            self.shift = False

    def prefill(self, tokens: Tensor, valid: Tensor) -> tuple[Tensor, TokenContext]:
        """See :meth:`CachedModel.prefill`."""
        return self._forward(tokens, valid, 0, 1)[:, -1], TokenContext(tokens, valid)

    def denoise(self, tokens: Tensor, cache: TokenContext) -> Tensor:
        """See :meth:`CachedModel.denoise`."""
        text, count = self._append(tokens, cache), tokens.shape[1]
        if self._from_left:
            return self._forward(text.tokens, text.valid, count, count + 1)[:, :-1]
        return self._forward(text.tokens, text.valid, count, count)

    def commit(self, tokens: Tensor, cache: TokenContext) -> tuple[Tensor, TokenContext]:
        """See :meth:`CachedModel.commit`."""
        self._check_block(tokens)
        text = self._append(tokens, cache)
        return self._forward(text.tokens, text.valid, 0, 1)[:, -1], text

    def _append(self, tokens: Tensor, cache: TokenContext) -> TokenContext:
        valid = torch.cat([cache.valid, torch.ones_like(tokens, dtype=torch.bool)], dim=1)
        return TokenContext(torch.cat([cache.tokens, tokens], dim=1), valid)

    def _forward(self, tokens: Tensor, valid: Tensor, active: int, keep: int) -> Tensor:
        """One pass in which the last ``active`` tokens are a block that sees itself in full."""
        length = tokens.shape[1]
        dense = torch.zeros(length, length, dtype=torch.bool, device=tokens.device)
        context = length - active
        dense[:context, :context] = self._among_context(context, tokens.device)
        dense[context:] = True
        if self.rule == "full":
            dense[:] = True
        mask = mask_for(self.model, AttentionMask.of(_with_padding(dense, valid)))
        return self._call(tokens, mask, _position_ids(valid), keep)
