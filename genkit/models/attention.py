"""Attention masks in the form that each backend reads, and the adapter that chooses it.

A mask is stated once, as a predicate over indices; the backends of transformers models want it in different forms, and
some misread the others' without a word:

| ``attn_implementation`` | form | given another form |
|---|---|---|
| ``sdpa`` | bool, True = attend | an additive float mask is right too |
| ``eager`` | additive float, 0 or the dtype's minimum | a bool mask is *added*: True becomes +1, no error |
| ``flex_attention`` | ``BlockMask`` | a bool tensor ends the process with a memory fault |
| ``genkit_xformers`` (CUDA) | additive float, rows aligned to 8 | |

FlexAttention has no backward pass on the CPU. So every mask goes through :func:`mask_for`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from genkit.errors import ConfigError, MissingExtraError

__all__ = [
    "XFORMERS",
    "AttentionMask",
    "Predicate",
    "additive",
    "check_attention",
    "default_backend",
    "evaluation_mode",
    "mask_for",
    "register_xformers",
]

#: ``predicate(batch, head, query, key)`` → bool, elementwise on index tensors: FlexAttention's ``mask_mod``.
Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

XFORMERS = "genkit_xformers"


@dataclass(frozen=True)
class AttentionMask:
    """Who may attend to whom.

    Args:
        predicate: ``(batch, head, query, key)`` → True where the query attends to the key; the same for all heads, made
            of tensor operations only.
        batch: number of rows B, or None where all rows share one mask.
        queries, keys: the mask's size.
        device: where it is wanted.
    """

    predicate: Predicate
    batch: int | None
    queries: int
    keys: int
    device: torch.device | str = "cpu"

    @classmethod
    def of(cls, dense: Tensor) -> AttentionMask:
        """The mask that a bool tensor (B or 1, 1, Q, K) states."""
        if dense.dtype != torch.bool or dense.ndim != 4 or dense.shape[1] != 1:
            raise ConfigError(
                f"a dense mask has dtype {dense.dtype} and shape {tuple(dense.shape)}; expected bool (B, 1, Q, K)"
            )
        shared = len(dense) == 1

        def predicate(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return dense[0 if shared else b, 0, q, k]

        mask = cls(predicate, None if shared else len(dense), dense.shape[2], dense.shape[3], dense.device)
        mask.__dict__["dense"] = dense
        return mask

    @cached_property
    def dense(self) -> Tensor:
        """Bool (B or 1, 1, Q, K), True = attend: what SDPA reads."""

        def index(size: int, axis: int) -> Tensor:
            shape = [1] * 4
            shape[axis] = size
            return torch.arange(size, device=self.device).view(shape)

        sizes = (self.batch or 1, 1, self.queries, self.keys)
        return self.predicate(*(index(size, axis) for axis, size in enumerate(sizes))).expand(sizes)

    def flex(self) -> Any:
        """FlexAttention's ``BlockMask`` (128 x 128 blocks, empty ones are skipped)."""
        return self._flex

    @cached_property
    def _flex(self) -> Any:
        # compiled on CUDA: the uncompiled way first makes the whole mask
        from torch.nn.attention.flex_attention import create_block_mask

        on_cuda = torch.device(self.device).type == "cuda"
        return create_block_mask(
            self.predicate, self.batch, None, self.queries, self.keys, device=str(self.device), _compile=on_cuda
        )


def additive(dense: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a bool mask is True, the smallest finite ``dtype`` elsewhere (−∞ gives NaN in some kernels)."""
    return torch.zeros(dense.shape, dtype=dtype, device=dense.device).masked_fill_(~dense, torch.finfo(dtype).min)


def default_backend(architecture: str, device: torch.device | str) -> str:
    """The ``attn_implementation`` for training with these masks: FlexAttention on CUDA, which skips empty blocks, else
    SDPA (GPT-2 of transformers has no FlexAttention).
    """
    on_cuda = torch.device(device).type == "cuda"
    return "flex_attention" if on_cuda and architecture != "gpt2" else "sdpa"


def mask_for(model: nn.Module, mask: AttentionMask) -> Any:
    """``mask`` in the form that this model's attention backend reads, to be passed as ``attention_mask``.

    Raises:
        ConfigError: a backend that reads no such mask (flash attention), or FlexAttention with gradients on the CPU.
    """
    backend = getattr(_config(model), "_attn_implementation", None)
    if backend == "sdpa":
        return mask.dense
    if backend == "eager":
        return additive(mask.dense, _dtype(model))
    if backend == "flex_attention":
        _refuse_flex_on_cpu(mask)
        return mask.flex()
    if backend == XFORMERS:
        return _aligned(mask.dense, _dtype(model))
    raise ConfigError(
        f"attn_implementation={backend!r} reads no 4-D mask; use 'sdpa', 'eager', 'flex_attention' (CUDA) or "
        f"{XFORMERS!r} (CUDA): model.set_attn_implementation('sdpa')"
    )


def _config(model: nn.Module) -> Any:
    return getattr(model, "config", None)


def _dtype(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def _refuse_flex_on_cpu(mask: AttentionMask) -> None:
    if torch.device(mask.device).type == "cpu" and torch.is_grad_enabled():
        raise ConfigError(
            "FlexAttention has no backward pass on the CPU; train with attn_implementation='sdpa' there, or wrap "
            "inference in torch.no_grad()"
        )


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout inside; afterwards each submodule is in the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


# --- does the model read the mask at all? -----------------------------------------------------------------------------

_CHECKED: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


@torch.no_grad()
def check_attention(model: nn.Module) -> None:
    """Refuses a model that does not obey a 4-D attention mask; three forward passes of four tokens, once a model.

    Some networks ignore the mask that they are given, others see only a window. Nothing fails then: the text just
    gets worse. So a causal mask must give what no mask gives, and a full mask must change the first token's logits.

    Raises:
        ConfigError: the model ignores or misreads the mask, or has sliding-window layers.
    """
    if not hasattr(_config(model), "vocab_size"):
        raise ConfigError(f"{type(model).__name__} is no language model of transformers: it has no config.vocab_size")
    backend = str(getattr(_config(model), "_attn_implementation", None))
    if _CHECKED.get(model) == backend:
        return
    kinds = set(getattr(_config(model), "layer_types", None) or ())
    if kinds - {"full_attention"}:
        raise ConfigError(
            f"{type(model).__name__} has layers of the kinds {sorted(kinds)}; block diffusion needs full attention in "
            "every layer (for Qwen: use_sliding_window=False)"
        )
    tokens, device = torch.arange(4).unsqueeze(0), next(model.parameters()).device
    tokens = tokens.remainder(_config(model).vocab_size).to(device)
    ones = torch.ones(1, 1, 4, 4, dtype=torch.bool, device=device)
    with evaluation_mode(model):
        plain = model(tokens, use_cache=False).logits.float()
        causal, full = (
            model(tokens, attention_mask=mask_for(model, AttentionMask.of(dense)), use_cache=False).logits.float()
            for dense in (ones.tril(), ones)
        )
    scale = float(plain.abs().amax()) + 1e-6
    if float((plain - causal).abs().amax()) > 0.02 * scale:
        raise ConfigError(
            f"{type(model).__name__} ({backend}) misreads a 4-D causal mask: its logits differ from its own"
        )
    if float((full - causal)[:, 0].abs().amax()) < 1e-6 * scale:
        raise ConfigError(
            f"{type(model).__name__} ({backend}) ignores the 4-D attention mask: the first token does not see the "
            "others under a full mask. Use an architecture of transformers that reads it (llama, qwen2, qwen3, gpt2)."
        )
    _CHECKED[model] = backend


# --- xformers ---------------------------------------------------------------------------------------------------------


def _aligned(dense: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive form with rows that start at multiples of 8 elements, which xformers' kernels ask for."""
    keys = dense.shape[-1]
    width = -(-keys // 8) * 8
    padded = torch.zeros(*dense.shape[:-1], width, dtype=dtype, device=dense.device)
    padded[..., :keys].masked_fill_(~dense, torch.finfo(dtype).min)
    return padded[..., :keys]


def register_xformers() -> str:
    """Registers xformers' memory-efficient attention with transformers, and returns its name for
    ``model.set_attn_implementation``. Its operators run on CUDA only.

    Raises:
        MissingExtraError: xformers is not installed.
    """
    try:
        import xformers.ops  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("xformers is not installed: install genkit-diffusion[xformers] (CUDA only)") from error
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(XFORMERS, _xformers_attention)
    AttentionMaskInterface.register(XFORMERS, sdpa_mask)
    return XFORMERS


def _xformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Mapping[str, Any],
) -> tuple[Tensor, None]:
    """transformers' attention function: query (B, H, Q, D), key and value (B, H_kv, K, D) → (B, Q, H, D)."""
    import xformers.ops

    groups = query.shape[1] // key.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
    bias: Any = None
    if attention_mask is None:
        bias = xformers.ops.LowerTriangularMask() if q.shape[1] > 1 else None
    else:
        if attention_mask.dtype != query.dtype:  # bool, or made for float32 weights that autocast runs in bfloat16
            dense = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
            attention_mask = _aligned(dense, query.dtype)
        bias = attention_mask.expand(len(query), query.shape[1], -1, -1)
    return xformers.ops.memory_efficient_attention(q, k, v, attn_bias=bias, p=dropout, scale=scaling), None
