"""The walk block by block: a language model writes a block of tokens in parallel, stores it, and goes on.

With a context-causal model (:class:`genkit.models.causal_lm.CachedCausalLM`) a block costs its denoising passes and one
commit, which also yields the next block's first token. A full block never takes more network calls than it has tokens
(``random``, which may be asked for more steps, excepted); a text that ends inside a block may, since the block is paid
for. Block length 1 is ordinary autoregressive decoding, token by token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from genkit._checks import checked_count, got
from genkit.errors import ConfigError, GenkitError
from genkit.models.attention import evaluation_mode
from genkit.samplers.noise import Keys, draw_keys
from genkit.samplers.strategies import DecodingStrategy, make_strategy

if TYPE_CHECKING:
    from genkit.models.causal_lm import CachedModel

__all__ = ["DecodeOutput", "DecodeStep", "decode_blocks"]


@dataclass(frozen=True)
class DecodeOutput:
    """What was written.

    Attributes:
        tokens: int64 (B, n), the new tokens; padded behind a row's end-of-sequence token. n is the longest row.
        calls: int64 (B,), network calls while the row was still being written, its prompt's pass included.
        tokens_per_call: float32 (B,), new tokens (the end-of-sequence token counts, padding does not) per call.
        lengths: int64 (B,), how many tokens of each row are no padding.
    """

    tokens: Tensor
    calls: Tensor
    tokens_per_call: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class DecodeStep:
    """What a callback sees after every network call.

    Attributes:
        kind: ``"prefill"``, ``"denoise"`` or ``"commit"``.
        call: number of the call, from 0.
        start: new tokens before this block.
        block: int64 (B, n), the block, masks included; after a commit the next block with its first token.
        done: bool (B,), rows that have ended.
    """

    kind: Literal["prefill", "denoise", "commit"]
    call: int
    start: int
    block: Tensor
    done: Tensor


@torch.no_grad()
def decode_blocks(
    model: CachedModel | torch.nn.Module,
    tokens: Tensor,
    valid: Tensor | None = None,
    *,
    mask_token_id: int,
    block_length: int = 32,
    max_new_tokens: int = 128,
    strategy: DecodingStrategy | str | Any = "threshold",
    generator: torch.Generator | Sequence[torch.Generator] | Keys | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    callback: Callable[[DecodeStep], Mapping[str, Tensor] | None] | None = None,
    sub_block_length: int | None = None,
) -> DecodeOutput:
    """Continues prompts block by block.

    Each row is decoded as if it were alone: its tokens do not depend on its batch mates, and its calls are counted
    until it ends. The last block may be short, so ``max_new_tokens`` need not be a multiple of ``block_length``.

    Args:
        model: a :class:`CachedModel`, or a transformers causal language model, which is then wrapped in
            :class:`genkit.models.causal_lm.CachedCausalLM`.
        tokens: int64 (B, L), the prompts.
        valid: bool (B, L), False where a row is padded, on its left or on its right; None: no padding.
        mask_token_id: the token that stands for an unknown one; it is never written.
        block_length: tokens that are refined together; 1 is autoregressive decoding.
        max_new_tokens: how many tokens to write at most.
        strategy: which tokens a pass makes known, and how they are drawn: a name or an object of
            :mod:`genkit.samplers.strategies`, or a scheduler with diffusers' ``step`` for block refinement.
        sub_block_length: parts of a block that are finished from left to right; None: the whole block at once.
        generator: one generator or one per row; only strategies with temperature, or ``random``, read it.
        eos_token_id: token (or tokens) that end a row, as soon as everything before it is known.
        pad_token_id: what follows a row's end; by default the first ``eos_token_id``, or 0.
        callback: called with a :class:`DecodeStep` after every network call; it may return ``{"block": tokens}`` to
            replace the block: masks put back are filled again, as long as they lie in the present sub-block or behind.

    Raises:
        ConfigError: an impossible argument: an empty prompt, masks in it, a text longer than the model reads.
        GenkitError: the network's logits are NaN or infinite, or a strategy leaves masks behind.

    Differs from NBDiff's released code in: rows are kept apart (a finished row is never written to), short last blocks,
    per-row ends, no commit behind the last block; see the method's README.
    """
    model = _as_cached(model)
    tokens, valid = _left_padded(tokens, valid)
    special = _Special.checked(mask_token_id, eos_token_id, pad_token_id, getattr(model, "vocab_size", None))
    sizes = _Sizes.checked(block_length, max_new_tokens, sub_block_length)
    _check_prompts(tokens, valid, special, model.max_length, sizes.max_new_tokens)
    strategy = make_strategy(strategy)
    walk = _Walk(model, strategy, _keys(generator, tokens), special, sizes, callback)
    network = getattr(model, "model", model)
    with evaluation_mode(network) if isinstance(network, torch.nn.Module) else nullcontext():
        return walk.run(tokens, valid)


@dataclass(frozen=True)
class _Special:
    """Tokens with a meaning, and how many there are in all (where the model says it)."""

    mask: int
    eos: list[int]
    pad: int
    vocabulary: int | None

    @classmethod
    def checked(cls, mask: Any, eos: Any, pad: Any, vocabulary: int | None) -> _Special:
        eos = eos.flatten().tolist() if isinstance(eos, Tensor) else eos
        several = eos if isinstance(eos, list | tuple | set) else [] if eos is None else [eos]
        ends = [_token("eos_token_id", end, vocabulary) for end in several]
        mask = _token("mask_token_id", mask, vocabulary)
        if mask in ends:
            raise ConfigError(f"mask_token_id={mask} is an end token too, and is never written; choose another token")
        pad = _token("pad_token_id", pad, vocabulary) if pad is not None else (ends[0] if ends else 0)
        return cls(mask, ends, pad, vocabulary)


@dataclass(frozen=True)
class _Sizes:
    block_length: int
    max_new_tokens: int
    sub_block_length: int

    @classmethod
    def checked(cls, block_length: int, max_new_tokens: int, sub_block_length: int | None) -> _Sizes:
        block_length = checked_count("block_length", block_length, "an integer, at least 1", 1)
        max_new_tokens = checked_count("max_new_tokens", max_new_tokens, "an integer, at least 0", 0)
        sub = block_length if sub_block_length is None else sub_block_length
        sub = checked_count("sub_block_length", sub, "an integer, at least 1, or None", 1)
        return cls(block_length, max_new_tokens, sub)

    def parts(self, size: int, first: int) -> Iterator[tuple[int, int]]:
        """The sub-blocks of a block of ``size`` tokens, from position ``first`` on."""
        for start in range(0, size, self.sub_block_length):
            begin, end = max(start, first), min(start + self.sub_block_length, size)
            if begin < end:
                yield begin, end


class _Walk:
    """One call of :func:`decode_blocks`: its constants, and the counters of its rows."""

    def __init__(
        self,
        model: CachedModel,
        strategy: DecodingStrategy,
        keys: Keys,
        special: _Special,
        sizes: _Sizes,
        callback: Callable[[DecodeStep], Mapping[str, Tensor] | None] | None,
    ) -> None:
        self.model, self.strategy, self.keys = model, strategy, keys
        self.mask, self.pad, self.eos, self.vocabulary = special.mask, special.pad, special.eos, special.vocabulary
        self.sizes, self.callback = sizes, callback
        self.calls = torch.zeros(len(keys), dtype=torch.int64, device=keys.key.device)
        self.ended = torch.zeros(len(keys), dtype=torch.bool, device=keys.key.device)  # before the present block
        self.done = self.ended
        self.finite = torch.ones((), dtype=torch.bool, device=keys.key.device)
        self.passes, self.replaced = 0, False

    def run(self, tokens: Tensor, valid: Tensor) -> DecodeOutput:
        total, written = self.sizes.max_new_tokens, 0
        out = torch.full((len(tokens), total), self.pad, dtype=torch.int64, device=tokens.device)
        if total and len(tokens):
            logits, cache = self.model.prefill(tokens, valid)
            block = self._next_block("prefill", logits, 0)
        while written < total and len(tokens):
            block = self._denoise(block, cache, written)
            out[:, written : written + block.shape[1]] = block
            written += block.shape[1]
            if written == total or not self._goes_on(~self.done):
                break
            logits, cache = self.model.commit(block, cache)
            block = self._next_block("commit", logits, written)
        return self._output(out[:, :written])

    def _goes_on(self, rows: Tensor) -> bool:
        """Whether any of the rows bool (B,) goes on: the one wait for the device before each network call."""
        going, finite = torch.stack([rows.any(), self.finite]).tolist()
        if not finite:
            raise GenkitError(
                f"network call {self.passes - 1} gave logits that are NaN or infinite; check the weights (overflow in "
                "half precision?) and the inputs"
            )
        return bool(going)

    def _next_block(self, kind: Literal["prefill", "commit"], logits: Tensor, start: int) -> Tensor:
        """The next block: masks behind the first token, which the causal pass has predicted."""
        self.calls += ~self.done
        self.ended = self.done
        size = min(self.sizes.block_length, self.sizes.max_new_tokens - start)
        block = torch.full((len(logits), size), self.mask, dtype=torch.int64, device=logits.device)
        if self.model.shift:
            logits = self._without_mask(logits)
            block[:, 0] = self.strategy.sample(logits, self.keys.at(step=self.calls, purpose="tokens"))
        block = torch.where(self.done.unsqueeze(1), self.pad, block)
        self._mark_ends(block)
        return self._report(kind, start, block, int(self.model.shift))

    def _denoise(self, block: Tensor, cache: Any, start: int) -> Tensor:
        """Refines the block until no row that goes on has masks in it."""
        shift = int(self.model.shift)
        for begin, end in self.sizes.parts(block.shape[1], shift):
            for step in itertools.count():
                masked = (block[:, begin:end] == self.mask) & ~self.done.unsqueeze(1)
                going = masked.any(dim=1)
                if not self._goes_on(going):
                    break
                self._check_progress(step, end - begin)
                logits = self._without_mask(self.model.denoise(block, cache)[:, begin - shift : end - shift])
                self.calls += going
                block = self._reveal(block, begin, end, logits, masked, step)
                self._mark_ends(block)
                block = self._report("denoise", start, block, begin)
        return block if not self.eos else torch.where(block == self.mask, self.pad, block)

    def _check_progress(self, step: int, size: int) -> None:
        """Refuses a strategy that does not finish; a callback may put masks back as often as it likes."""
        if not self.replaced and step >= max(size, getattr(self.strategy, "steps", None) or 0):
            raise GenkitError(
                f"{self.strategy} left masks after {step} passes over {size} positions; every pass must reveal at "
                "least one masked position of each row"
            )

    def _reveal(self, block: Tensor, begin: int, end: int, logits: Tensor, masked: Tensor, step: int) -> Tensor:
        keys = self.keys.at(step=self.calls, purpose="tokens")
        part = block[:, begin:end]
        revealed = self.strategy.reveal(logits, part, masked, step, keys)
        block = block.clone()
        block[:, begin:end] = torch.where(masked, revealed, part)
        return block

    def _without_mask(self, logits: Tensor) -> Tensor:
        """The mask token has probability exactly 0; and what is not finite is noted and kept from the strategy."""
        logits[..., self.mask] = -torch.inf
        finite = logits.amax(dim=-1).isfinite()
        self.finite = self.finite & (finite.reshape(len(logits), -1).all(dim=1) | self.done).all()
        return logits.masked_fill_(~finite.unsqueeze(-1), 0.0)

    def _mark_ends(self, block: Tensor) -> None:
        """A row has ended when an end token stands in it with everything before it known."""
        if not self.eos:
            return
        known = (block != self.mask).cumprod(dim=1).bool()
        self.done = self.ended | (self._is_end(block) & known).any(dim=1)

    def _is_end(self, block: Tensor) -> Tensor:
        ends = block == self.eos[0]
        for token in self.eos[1:]:
            ends = ends | (block == token)
        return ends

    def _report(
        self, kind: Literal["prefill", "denoise", "commit"], start: int, block: Tensor, fillable: int
    ) -> Tensor:
        """Calls the callback; masks before position ``fillable`` would never be filled."""
        self.passes += 1
        if self.callback is None:
            return block
        self._goes_on(self.done)  # nothing is shown of logits that are not finite
        given = block
        block = _replaced(self.callback(DecodeStep(kind, self.passes - 1, start, given, self.done)), given)
        self.replaced = self.replaced or block is not given
        if bool(((block < 0) | (block >= (self.vocabulary or torch.iinfo(block.dtype).max))).any()):
            raise ConfigError(f"the callback's block holds tokens outside the vocabulary of {self.vocabulary}")
        self._mark_ends(block)
        if bool(((block[:, :fillable] == self.mask) & ~self.done.unsqueeze(1)).any()):
            raise ConfigError(
                f"the callback put the mask token {self.mask} before position {fillable} of the block, where no later "
                "pass fills it"
            )
        return block

    def _output(self, out: Tensor) -> DecodeOutput:
        """Padding behind each row's first end token, and the counts."""
        self._goes_on(self.done)
        width = out.shape[1]
        if self.eos:
            ends = self._is_end(out)
            after = (ends.cumsum(dim=1) - ends.long()) > 0
            lengths = width - after.sum(dim=1)
            out = torch.where(after, self.pad, out)
        else:
            lengths = torch.full_like(self.calls, width)
        longest = int(lengths.max()) if len(lengths) else 0
        per_call = lengths.to(torch.float32) / self.calls.clamp(min=1)
        return DecodeOutput(out[:, :longest], self.calls, per_call, lengths)


# --- arguments --------------------------------------------------------------------------------------------------------


def _as_cached(model: CachedModel | torch.nn.Module) -> CachedModel:
    if all(hasattr(model, name) for name in ("prefill", "denoise", "commit")):
        return model  # type: ignore[return-value]
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"model has {got(model)}; expected a causal language model of transformers, or prefill, denoise and commit"
        )
    from genkit.models.causal_lm import CachedCausalLM

    return CachedCausalLM(model)


def _token(name: str, value: Any, vocabulary: int | None) -> int:
    token = checked_count(name, value, "a token, an integer from 0", 0)
    if vocabulary is not None and token >= vocabulary:
        raise ConfigError(f"{name}={token}; expected one of the model's {vocabulary} tokens")
    return token


def _keys(generator: Any, tokens: Tensor) -> Keys:
    if not isinstance(generator, Keys):
        return draw_keys(generator, len(tokens), tokens.device)
    if len(generator) != len(tokens):
        raise ConfigError(f"generator holds {len(generator)} keys, but there are {len(tokens)} prompts")
    return generator.to(tokens.device)


def _replaced(changed: Any, block: Tensor) -> Tensor:
    """The block after a callback that returned ``changed``."""
    changed = {} if changed is None else changed
    if not isinstance(changed, Mapping) or set(changed) - {"block"}:
        what = sorted(map(str, changed)) if isinstance(changed, Mapping) else got(changed)
        raise ConfigError(f"the callback returned {what}; expected None or {{'block': tokens}}")
    new = changed.get("block", block)
    if not isinstance(new, Tensor) or (new.shape, new.dtype, new.device) != (block.shape, block.dtype, block.device):
        raise ConfigError(
            f"the callback returned a block with {got(new)} ({getattr(new, 'dtype', None)}, "
            f"{getattr(new, 'device', None)}); expected shape {tuple(block.shape)} ({block.dtype}, {block.device})"
        )
    return new


def _left_padded(tokens: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """The prompts with their padding on the left, and no column of padding alone."""
    if not _whole(tokens) or tokens.dtype == torch.bool or tokens.ndim != 2:
        kind = getattr(tokens, "dtype", None)
        raise ConfigError(f"tokens has {got(tokens)} and dtype {kind}; expected int64 (B, L)")
    tokens = tokens.to(torch.int64)
    if valid is None:
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    if not _whole(valid) or valid.shape != tokens.shape:
        kind = getattr(valid, "dtype", None)
        raise ConfigError(f"valid has {got(valid)} and dtype {kind}; expected bool {tuple(tokens.shape)}, as tokens")
    valid = valid.to(tokens.device, torch.bool)
    tokens = tokens.masked_fill(~valid, 0)  # padding is often a number outside the vocabulary, such as −100
    order = valid.long().argsort(dim=1, stable=True)  # padding first; the tokens keep their order
    tokens, valid = tokens.gather(1, order), valid.gather(1, order)
    used = int(valid.sum(dim=1).max()) if valid.numel() else 0
    return tokens[:, tokens.shape[1] - used :], valid[:, valid.shape[1] - used :]


def _whole(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()


def _check_prompts(tokens: Tensor, valid: Tensor, special: _Special, longest: int | None, new: int) -> None:
    empty = (~valid.any(dim=1)).nonzero().flatten().tolist() if tokens.shape[1] else list(range(len(tokens)))
    if empty:
        raise ConfigError(f"rows {empty} of tokens hold no prompt; start them with at least one token, such as BOS")
    if bool(((tokens == special.mask) & valid).any()):
        raise ConfigError(f"the prompts hold the mask token {special.mask}; a prompt is text that is known")
    low, high = (int(tokens.min()), int(tokens.max())) if tokens.numel() else (0, 0)
    if low < 0 or (special.vocabulary is not None and high >= special.vocabulary):
        raise ConfigError(
            f"the prompts hold tokens from {low} to {high}; expected the model's {special.vocabulary or ''} tokens, "
            "from 0"
        )
    if longest is not None and tokens.shape[1] + new > longest:
        raise ConfigError(
            f"a prompt of {tokens.shape[1]} tokens and {new} new ones make {tokens.shape[1] + new}, but the model "
            f"reads {longest}; shorten the prompt or ask for fewer new tokens"
        )
