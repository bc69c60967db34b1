"""Masked tokens: the absorbing chain of block diffusion, and its refinement of a block by confidence.

A clean token x_0 is replaced by the mask m with probability t, on its own (t = 1: all masked, t = 0: clean; the linear
schedule α_t = 1 − t). A step back from t to s ≤ t acts on each position by itself::

    p(x_s = m | x_t = m) = s/t,    p(x_s = v | x_t = m) = (1 − s/t) p_θ(v),    p(x_s = x_t | x_t ≠ m) = 1

References: Sahoo et al., "Simple and effective masked diffusion language models", arXiv 2406.07524 (the absorbing chain
and its reverse posterior, here with the linear schedule); Arriola et al., "Block diffusion", arXiv 2503.09573. The
refinement step is that of diffusers' ``BlockRefinementScheduler``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin  # noqa: F401  (diffusers looks it up here by name)
from diffusers.utils import BaseOutput
from torch import Tensor

from genkit._checks import check_generator, check_same_shape, checked_count, checked_number, checked_shape, got
from genkit.errors import ConfigError
from genkit.schedulers.base import ConfiguredScheduler
from genkit.schedulers.gaussian import Context, _as_time, _at_least_float32, _check_fit, _lacks_float64
from genkit.schedulers.transition import CategoricalTransition, Noise, expand_as

__all__ = [
    "MaskedBlockScheduler",
    "MaskedBlockSchedulerOutput",
    "check_sampling_options",
    "draw_tokens",
    "greedy_tokens",
    "sampling_logits",
]

_HEAD = 512  # tokens that are looked at before a whole vocabulary is sorted
Randomness = torch.Generator | Sequence[torch.Generator] | Noise | None


@dataclass
class MaskedBlockSchedulerOutput(BaseOutput):
    """What :meth:`MaskedBlockScheduler.step` returns.

    Args:
        prev_sample: the block after the step, int64 (B, n).
        transfer_index: the positions that were committed, bool (B, n).
        sampled_tokens: the proposal at every position, int64 (B, n).
        sampled_probs: the probability of each proposal, float32 (B, n).
    """

    prev_sample: Tensor
    transfer_index: Tensor
    sampled_tokens: Tensor
    sampled_probs: Tensor


class MaskedBlockScheduler(ConfiguredScheduler):
    """The absorbing chain as a kernel (:meth:`transition`), and blocks refined by confidence (:meth:`step`).

    ``step`` commits, in each row, all masked positions whose proposal has a probability above ``threshold``; where
    these are fewer than the step's quota, the quota's most probable ones instead. Equal to diffusers'
    ``BlockRefinementScheduler`` with masks and without editing, but without a loop over the rows.

    Args:
        mask_token_id: the mask's id; None: named in each call of :meth:`step` and :meth:`add_noise`.
        block_length: tokens in a block, n.
        num_inference_steps: steps over which a block's n tokens are spread evenly.
        threshold: probability above which a proposal is committed at once; above 1 none is.
        minimal_topk: least number of tokens that a step with a quota commits (quotas are 0 after the n-th step).

    Raises:
        ConfigError: an option of another type or range.
    """

    context_names = ()

    @register_to_config
    def __init__(
        self,
        mask_token_id: int | None = None,
        block_length: int = 32,
        num_inference_steps: int = 32,
        threshold: float = 0.9,
        minimal_topk: int = 1,
    ) -> None:
        if mask_token_id is not None:
            checked_count("mask_token_id", mask_token_id, "a token id, at least 0, or None", 0)
        self.mask_token_id = mask_token_id
        self.block_length = checked_count("block_length", block_length)
        self.threshold = _checked_threshold(threshold)
        self.minimal_topk = checked_count("minimal_topk", minimal_topk)
        self.set_timesteps(num_inference_steps)

    # ---- the kernel ---------------------------------------------------------------------------------------------

    def times(self, n: int, device: torch.device | str | None = None) -> Tensor:
        """Equally spaced times from 1 (all masked) to 0 (clean), (n + 1,), float64 (float32 where that is lacking).

        Raises:
            ConfigError: ``n`` is not a positive integer.
        """
        dtype = torch.float32 if _lacks_float64(device) else torch.float64
        return torch.linspace(1.0, 0.0, checked_count("num_inference_steps", n) + 1, dtype=dtype, device=device)

    def transition(
        self,
        model_output: Tensor,
        t: Tensor | float,
        s: Tensor | float,
        sample: Tensor,
        context: Context | None = None,
        eta: float | None = None,
    ) -> CategoricalTransition:
        """p(x_s | x_t) for 0 ≤ s ≤ t ≤ 1: the kernel of the module's docstring. Samples with s = t stay where they are.

        Args:
            model_output: logits of the clean token (B, n, V), aligned to ``sample``; the mask's own is not read.
            t: current times, () or (B,).
            s: next times, () or (B,).
            sample: x_t, int64 (B, n), with ``mask_token_id`` at masked positions.
            context: not read.
            eta: None or 1: this chain has one kernel, the ancestral one.

        Raises:
            ConfigError: tensors that do not fit, Python times out of order, a scheduler without ``mask_token_id``, one
                whose id has no logit, or another ``eta``.
        """
        self._check_transition(model_output, t, s, sample, eta)
        mask_id = self._mask_id(None)
        logits = _at_least_float32(model_output)
        stay = _stay_probability(t, s)
        stay = stay.reshape(stay.shape + (1,) * (logits.ndim - 1)) if stay.ndim else stay
        log_stay, log_move = (p.log().to(logits.device, logits.dtype) for p in (stay, 1.0 - stay))
        classes = torch.arange(logits.shape[-1], device=logits.device)
        clean = logits.masked_fill(classes == mask_id, -math.inf).log_softmax(dim=-1)
        masked_row = torch.where(classes == mask_id, log_stay, clean + log_move)
        kept_row = torch.where(classes == sample.unsqueeze(-1), 0.0, -math.inf).to(clean.dtype)
        return CategoricalTransition(torch.where((sample == mask_id).unsqueeze(-1), masked_row, kept_row))

    def prior(self, keys: Noise, shape: Sequence[int], context: Context | None = None) -> Tensor:
        """All positions masked, int64 (B, \\*shape): what a walk starts from; ``shape`` is one sample's.

        Raises:
            ConfigError: a scheduler without ``mask_token_id``.
        """
        one = keys.uniform(checked_shape("shape", shape, "the shape of one sample, a sequence of sizes"))
        return torch.full_like(one, self._mask_id(None), dtype=torch.int64)

    def mask_tokens(self, x0: Tensor, uniform: Tensor, t: Tensor | float) -> Tensor:
        """x_t given x_0: the mask wherever a position's uniform number in [0, 1) is below t, int64 (B, \\*).

        Args:
            x0: clean tokens, int64 (B, \\*).
            uniform: one number a position, (B, \\*), of the sample's own stream.
            t: times, () or (B,).
        """
        _check_fit(None, "uniform", uniform, "x0", x0, t)
        time = _as_time(t).to(uniform.device, uniform.dtype)
        return torch.where(uniform < expand_as(time, uniform), self._mask_id(None), x0)

    def to_x0(self, model_output: Tensor, t: Tensor | float, sample: Tensor, context: Context | None = None) -> Tensor:
        """The most probable clean tokens, int64 (B, \\*): committed ones stay; the mask's own logit is not read."""
        _check_logits(model_output, sample)
        mask_id = self._mask_id(None)
        classes = torch.arange(model_output.shape[-1], device=model_output.device)
        best = model_output.masked_fill(classes == mask_id, -math.inf).argmax(dim=-1)
        return torch.where(sample == mask_id, best, sample)

    def _check_transition(self, model_output: Any, t: Any, s: Any, sample: Any, eta: float | None) -> None:
        if eta is not None and eta != 1:
            raise ConfigError(f"eta={eta!r}; expected None or 1: a masked chain has one kernel, the ancestral one")
        _check_logits(model_output, sample)
        _check_fit(None, "model_output[..., 0]", model_output[..., 0], "sample", sample, t, s)
        if not isinstance(t, Tensor) and not isinstance(s, Tensor) and s > t:
            raise ConfigError(f"s={s!r} is after t={t!r}; expected 0 ≤ s ≤ t ≤ 1, since a step goes from noise to data")
        if self._mask_id(None) >= model_output.shape[-1]:
            raise ConfigError(
                f"mask_token_id={self.mask_token_id}, but model_output has {model_output.shape[-1]} classes; expected "
                "logits over a vocabulary that contains the mask"
            )

    def _mask_id(self, given: int | None) -> int:
        mask_id = self.mask_token_id if given is None else given
        if mask_id is None:
            raise ConfigError(
                "no mask_token_id is known; expected MaskedBlockScheduler(mask_token_id=…), or mask_token_id= in the "
                "call (there is no uniform mode)"
            )
        return mask_id

    # ---- diffusers' loops ---------------------------------------------------------------------------------------

    def set_timesteps(
        self, num_inference_steps: int, device: torch.device | str | None = None, block_length: int | None = None
    ) -> None:
        """Prepares ``timesteps`` (n − 1, …, 0) and the quotas of :meth:`step` for blocks of ``block_length`` tokens.

        Raises:
            ConfigError: not positive integers.
        """
        n = self.block_length if block_length is None else checked_count("block_length", block_length)
        self.num_inference_steps = checked_count("num_inference_steps", num_inference_steps)
        self.timesteps = torch.arange(self.num_inference_steps, device=device).flip(0)
        spread = self.get_num_transfer_tokens(n, self.num_inference_steps)
        self._quotas = torch.where(spread > 0, spread.clamp(min=self.minimal_topk), 0).tolist()

    def get_num_transfer_tokens(self, block_length: int, num_inference_steps: int) -> Tensor:
        """``block_length`` tokens spread over the steps as evenly as integers can be, larger first: int64 (steps,)."""
        if num_inference_steps <= 0:
            return torch.zeros(0, dtype=torch.int64)
        each, rest = divmod(block_length, num_inference_steps)
        return each + (torch.arange(num_inference_steps) < rest).to(torch.int64)

    def step(
        self,
        model_output: Tensor,
        timestep: Tensor | int,
        sample: Tensor,
        *,
        mask_token_id: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        threshold: float | None = None,
        generator: Randomness = None,
        return_dict: bool = True,
    ) -> MaskedBlockSchedulerOutput | tuple[Tensor, Tensor, Tensor, Tensor]:
        """Commits a part of the masked positions of each row; all others stay as they are.

        As in diffusers the logits are taken as they come: where the mask itself must not be proposed, give it −inf.

        Args:
            model_output: logits (B, n, V), aligned to ``sample``.
            timestep: which step of the schedule this is, counted up from 0; later ones have the last one's quota.
            sample: the block, int64 (B, n).
            mask_token_id: None takes the scheduler's own.
            temperature: 0 proposes the most probable token, with its untempered probability; above 0 one is drawn.
            top_p: proposals are drawn from the smallest set of tokens with at least this mass.
            top_k: proposals are drawn from the ``top_k`` most probable tokens.
            threshold: None takes the scheduler's own.
            generator: for a temperature above 0: one, a list with one a row, or a row's own stream each
                (:class:`genkit.samplers.Keys`); with the last two a row's draws do not depend on the others.
            return_dict: whether to return an output object or a tuple.

        Raises:
            ConfigError: tensors that do not fit, options out of range, no mask's id, a negative step.
        """
        check_sampling_options(temperature, top_k, top_p)
        _check_logits(model_output, sample)
        quota = self._quotas[min(_step_index(timestep), len(self._quotas) - 1)]
        threshold = self.threshold if threshold is None else _checked_threshold(threshold)
        if temperature == 0:
            tokens, probs = greedy_tokens(model_output)
        else:
            logits = sampling_logits(model_output, temperature, top_k, top_p)
            tokens, probs = draw_tokens(logits, _uniform(sample.shape, generator, sample.device))
        active = sample == self._mask_id(mask_token_id)
        transfer = _transfer(probs, active, quota, threshold)
        prev = torch.where(transfer, tokens, sample)
        if not return_dict:
            return prev, transfer, tokens, probs
        return MaskedBlockSchedulerOutput(prev, transfer, tokens, probs)

    def add_noise(
        self,
        original_samples: Tensor,
        attention_mask: Tensor,
        *,
        prompt_length: int,
        block_length: int,
        mask_token_id: int | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Two complementary noisy views: each real token after the prompt is masked in exactly one of them.

        In each block of each row a share is drawn uniformly; the first view masks each token with this probability.

        Args:
            original_samples: clean tokens, int64 (B, L).
            attention_mask: 1 at real tokens, 0 at padding, (B, L).
            prompt_length: number of leading tokens that are never masked.
            block_length: tokens in a block, counted from the end of the prompt.
            mask_token_id: None takes the scheduler's own.
            generator: one, a list with one a row, or None for torch's global generator.

        Returns:
            ``(noisy, noisy_rev, masked, masked_rev)``: int64 and bool, (B, L) each.
        """
        check_same_shape("attention_mask", attention_mask, "original_samples", original_samples)
        check_generator(generator)
        start = checked_count("prompt_length", prompt_length, "a length, at least 0", 0)
        size, mask_id = checked_count("block_length", block_length), self._mask_id(mask_token_id)
        if original_samples.ndim != 2:
            raise ConfigError(f"original_samples has {got(original_samples)}; expected tokens (B, L)")
        rows, length = original_samples.shape
        chosen = [torch.zeros(rows, min(start, length), dtype=torch.bool, device=original_samples.device)]
        for first in range(start, length, size):  # share before tokens, block by block: the order of diffusers' draws
            share = _uniform((rows, 1), generator, original_samples.device)
            width = min(size, length - first)
            chosen.append(_uniform((rows, width), generator, original_samples.device) < share)
        valid = attention_mask.to(torch.bool)
        masked = torch.cat(chosen, dim=1) & valid
        masked_rev = valid & ~masked
        masked_rev[:, :start] = False
        noisy, noisy_rev = (original_samples.masked_fill(m, mask_id) for m in (masked, masked_rev))
        return noisy, noisy_rev, masked, masked_rev


# ---- proposals: shared with the decoding strategies --------------------------------------------------------------


def check_sampling_options(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuses a temperature that is negative or not finite, ``top_k`` below 1 and ``top_p`` outside (0, 1].

    Raises:
        ConfigError: what was got and what was expected.
    """
    checked_number("temperature", temperature, "0 (greedy) or a positive number", lambda v: 0 <= v < math.inf)
    if top_k is not None:
        checked_count("top_k", top_k, "a positive integer, or None")
    if top_p is not None:
        checked_number("top_p", top_p, "a number above 0 and at most 1, or None", lambda v: 0 < v <= 1)


def greedy_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable token (the first of equals) and its probability, int64 and float32 (B, \\*), of (B, \\*, V)."""
    # of the logits, not the probabilities: rounding makes neighbours equal. max is faster than argmax on the CPU
    return logits.max(dim=-1)[1], logits.softmax(dim=-1, dtype=torch.float32).amax(dim=-1)


def sampling_logits(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Logits / temperature in float32, −inf outside the ``top_k`` and then the nucleus ``top_p``, (B, \\*, V).

    ``top_p`` keeps the smallest set of most probable tokens whose mass (after ``top_k``) is at least ``top_p``: always
    one. Of equal tokens at the border the first ones in the vocabulary are kept.
    """
    z = logits.to(torch.float32)
    # shifted first: no temperature, however small, then overflows
    z = (z - z.amax(dim=-1, keepdim=True)) / max(temperature, 1e-37)
    size = z.shape[-1]
    k = size if top_k is None else min(top_k, size)
    p = 1.0 if top_p is None else top_p
    if k == size and p == 1.0:
        return z
    largest = z if k == size else z.topk(k, dim=-1)[0]
    count = torch.full_like(z[..., :1], k, dtype=torch.int64)
    if p < 1.0:
        largest, mass = _nucleus(largest, p)
        count = (mass[..., :-1] < p).sum(dim=-1, keepdim=True) + 1
    border = largest.gather(-1, count - 1)
    above, equal = z > border, z == border
    room = count - above.sum(dim=-1, keepdim=True)
    return z.masked_fill(~(above | (equal & (equal.cumsum(dim=-1) <= room))), -math.inf)


def _nucleus(z: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """The largest logits in falling order and their cumulated probabilities, far enough to hold the mass ``p``."""
    norm = z.logsumexp(dim=-1, keepdim=True)
    if z.device.type == "cpu" and z.shape[-1] > 4 * _HEAD:  # sorting a large vocabulary costs more than a forward pass
        head = z.topk(_HEAD, dim=-1)[0]
        mass = (head - norm).exp().cumsum(dim=-1)
        if bool((mass[..., -1] >= p).all()):
            return head, mass
    largest = z.sort(dim=-1, descending=True)[0]
    return largest, (largest - norm).exp().cumsum(dim=-1)


def draw_tokens(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens by inversion of the cumulative distribution, and their probabilities: int64 and float32, (B, \\*).

    A token of probability 0 is never drawn, whatever the size of the vocabulary and the rounding of the sums.

    Args:
        logits: (B, \\*, V).
        uniform: numbers in [0, 1), (B, \\*).
    """
    probs = logits.softmax(dim=-1, dtype=torch.float32)
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[..., -1:]
    # strictly below the last sum, which u · total may round up to
    level = (uniform.unsqueeze(-1) * total).to(torch.float32)
    level = torch.minimum(level, torch.nextafter(total, torch.zeros_like(total))).contiguous()
    tokens = torch.searchsorted(cumulative, level, right=True).clamp_(max=probs.shape[-1] - 1)
    chosen = probs.gather(-1, tokens)
    # sums that a device forms in parallel need not be monotone to the last bit
    top, best = probs.max(dim=-1, keepdim=True)
    tokens, chosen = torch.where(chosen > 0, tokens, best), torch.where(chosen > 0, chosen, top)
    return tokens.squeeze(-1), chosen.squeeze(-1)


def _transfer(probs: Tensor, active: Tensor, quota: int, threshold: float) -> Tensor:
    """All active positions above the threshold; where they are fewer than the quota, the most probable ones."""
    confidence = probs.masked_fill(~active, -math.inf)
    high = confidence > threshold
    ranks = confidence.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    enough = high.sum(dim=-1, keepdim=True) >= quota
    return torch.where(enough, high, active & (ranks < quota))


def _stay_probability(t: Tensor | float, s: Tensor | float) -> Tensor:
    """s/t, and 1 where s = t (at t = 0 too), () or (B,)."""
    t, s = _as_time(t), _as_time(s)
    s = s.to(t.device) if t.ndim else s
    t = t.to(s.device)
    still = s == t
    return torch.where(still, 1.0, s / torch.where(still, 1.0, t))


def _uniform(shape: Sequence[int], generator: Randomness, device: torch.device) -> Tensor:
    """Uniform numbers (B, \\*) in [0, 1) from one generator, from one a row, or from keys."""
    keys: Any = generator
    if not isinstance(generator, torch.Generator) and callable(getattr(generator, "uniform", None)):
        uniform = keys.uniform(tuple(shape[1:]))
        if uniform.shape != torch.Size(shape):
            raise ConfigError(f"generator gives numbers of {got(uniform)}; expected one stream per row, {tuple(shape)}")
        return uniform.to(device)
    check_generator(generator)
    if isinstance(generator, torch.Generator) or generator is None:
        source = device if generator is None else generator.device
        return torch.rand(tuple(shape), generator=generator, device=source).to(device)
    if len(keys) != shape[0]:
        raise ConfigError(f"generator is a list of {len(keys)}; expected one per row, {shape[0]}, or a single one")
    return torch.stack([torch.rand(tuple(shape[1:]), generator=g, device=g.device).to(device) for g in keys])


def _check_logits(model_output: Any, sample: Any) -> None:
    fits = isinstance(model_output, Tensor) and isinstance(sample, Tensor) and model_output.ndim == sample.ndim + 1
    if not fits or model_output.shape[:-1] != sample.shape:
        raise ConfigError(
            f"model_output has {got(model_output)}, sample has {got(sample)}; expected logits (B, n, V) for tokens "
            "(B, n)"
        )


def _step_index(timestep: Any) -> int:
    if isinstance(timestep, Tensor):
        if timestep.numel() != 1:
            raise ConfigError(f"timestep has {got(timestep)}; expected one step's index")
        timestep = int(timestep)
    return checked_count("timestep", timestep, "a step's index, at least 0", 0)


def _checked_threshold(threshold: Any) -> float:
    return checked_number("threshold", threshold, "a number, at least 0 (above 1: never)", lambda v: 0 <= v < math.inf)
