"""Tiny random language models of transformers: what the tests of masks, caches and decoding run on."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from torch import nn

VOCAB = 23
MASK, EOS, PAD = 22, 1, 0
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")

#: 4 heads of 8; grouped key-value heads, so that a mix-up of heads shows.
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "tie_word_embeddings": False,
}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 160}
_NO_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def tiny_lm(
    name: str, *, attention: str = "sdpa", dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any
) -> Any:
    """A model with weights large enough that its argmax follows the context; the global generator stays where it is."""
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    }[name]
    sizes = _GPT2 if name == "gpt2" else {**_SIZES, **({"head_dim": 8} if name == "qwen3" else {})}
    config = config_class(**{**sizes, **_NO_SPECIAL, **changes})
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.25)
    return model.to(dtype).eval()


@cache
def shared_lm(name: str, attention: str = "sdpa", dtype: torch.dtype = torch.float64) -> Any:
    """One model for all tests of a process that do not change it."""
    return tiny_lm(name, attention=attention, dtype=dtype)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def prompts(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged prompts without special tokens, padded on the left."""
    tokens = torch.randint(2, MASK, (len(lengths), max(lengths)), generator=seeded(seed))
    valid = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths).unsqueeze(1)
    return tokens.masked_fill(~valid, PAD), valid
