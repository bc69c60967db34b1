"""Tokenizers: one of characters for the small models, and which token of a given one can stand for "masked"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from genkit.data.tasks import SPECIAL
from genkit.errors import ConfigError, nearest

__all__ = ["UNUSED_TOKENS", "character_tokenizer", "check_mask_id", "choose_mask_token", "encode_text", "pad_left"]

#: Special tokens of known tokenizers that text does not contain, in the order in which they are taken as mask token.
UNUSED_TOKENS = ("<mask>", "<|mask|>", "[MASK]", "<|fim_pad|>", "<|reserved_special_token_0|>", "<empty_output>")


def character_tokenizer(alphabet: str, model_max_length: int = 512) -> Any:
    """A transformers tokenizer with one token a character: ``<pad>`` 0, ``<eos>`` 1, ``<mask>`` 2, then ``alphabet``.

    Raises:
        ConfigError: an empty alphabet or one with repeated characters.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if not alphabet or len(set(alphabet)) != len(alphabet):
        raise ConfigError(f"alphabet={alphabet!r}; expected each character once, and at least one")
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    pad, eos, mask = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=pad,
        eos_token=eos,
        mask_token=mask,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def encode_text(tokenizer: Any, text: str) -> Tensor:
    """The text's tokens, int64 (n,), without any that the tokenizer adds around it.

    Raises:
        ConfigError: a character that a character tokenizer does not know.
    """
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)
    if not _is_character_tokenizer(tokenizer):
        return ids
    unknown = (ids == tokenizer.pad_token_id).nonzero()
    if len(unknown):
        place = int(unknown[0])
        raise ConfigError(
            f"character {text[place]!r} at place {place} is not in this model's alphabet: "
            f"{''.join(sorted(t for t in tokenizer.get_vocab() if len(t) == 1))!r}"
        )
    return ids


def _is_character_tokenizer(tokenizer: Any) -> bool:
    if tokenizer.convert_ids_to_tokens(list(range(len(SPECIAL)))) != list(SPECIAL):
        return False  # reading a whole large vocabulary takes longer than encoding a text
    return all(len(token) == 1 for token, i in tokenizer.get_vocab().items() if i >= len(SPECIAL))


def choose_mask_token(model: Any, tokenizer: Any, mask_token: str | int | None = None) -> int:
    """The id of the mask token; a token that is not there yet is added to tokenizer and model.

    Args:
        model: a causal language model of transformers, changed only where a token is added (its new embedding is the
            mean of the others).
        tokenizer: its tokenizer.
        mask_token: a token's text or id; None takes the tokenizer's own mask token, else the first of
            :data:`UNUSED_TOKENS` that it has.

    Raises:
        ConfigError: None was given and the tokenizer has no such token; or a token that cannot be one
            (:func:`check_mask_id`).
    """
    vocabulary = tokenizer.get_vocab()
    if mask_token is None:
        own = getattr(tokenizer, "mask_token", None)
        found = [token for token in ([own] if own else []) + list(UNUSED_TOKENS) if token in vocabulary]
        if not found:
            raise ConfigError(
                f"{type(tokenizer).__name__} has no mask token and none of {', '.join(UNUSED_TOKENS)}; name an unused "
                "token (mask_token='<name>'), or give a new name such as mask_token='<|mask|>' to add one"
            )
        mask_token = found[0]
    if isinstance(mask_token, bool) or not isinstance(mask_token, (str, int)):
        raise ConfigError(f"mask_token={mask_token!r}; expected a token's text or id, or None")
    if isinstance(mask_token, str) and mask_token not in vocabulary:
        return _added(model, tokenizer, mask_token)
    return check_mask_id(model, tokenizer, mask_token if isinstance(mask_token, int) else vocabulary[mask_token])


def check_mask_id(model: Any, tokenizer: Any, index: int) -> int:
    """``index`` where it can stand for "masked".

    Raises:
        ConfigError: outside the vocabulary, or the token that ends or pads texts.
    """
    for name in ("eos", "pad", "bos"):
        if index == getattr(tokenizer, f"{name}_token_id", None):
            raise ConfigError(
                f"mask_token {index} is the tokenizer's {name} token; choose one that text never contains"
            )
    size = model.get_input_embeddings().weight.shape[0]
    if not 0 <= index < size:
        raise ConfigError(f"mask_token {index} is outside the model's vocabulary of {size} tokens")
    return index


def _added(model: Any, tokenizer: Any, token: str) -> int:
    if not token.startswith(("<", "[")):
        raise ConfigError(
            f"mask_token={token!r} is not in the vocabulary.{nearest(token, list(tokenizer.get_vocab()))} A new token "
            "is added only where it looks like one: '<|mask|>' or '[MASK]'"
        )
    tokenizer.add_special_tokens({"mask_token": token})
    index = int(tokenizer.convert_tokens_to_ids(token))
    old = model.get_input_embeddings().weight.shape[0]
    if index >= old:
        model.resize_token_embeddings(index + 1, mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight[index] = layer.weight[: min(old, index)].mean(dim=0)
    return index


def pad_left(rows: Sequence[Tensor], pad: int) -> tuple[Tensor, Tensor]:
    """Prompts of several lengths as one batch: tokens int64 (B, L) and valid bool (B, L)."""
    longest = max((len(row) for row in rows), default=0)
    tokens = torch.full((len(rows), longest), pad, dtype=torch.int64)
    valid = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, longest - len(row) :] = row
        valid[i, longest - len(row) :] = True
    return tokens, valid
