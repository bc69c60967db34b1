"""Decoding strategies: which masked positions of a block a pass reveals, and as which tokens.

After each forward pass a strategy reads the logits of a (part of a) block and fills in some of its masks. At
temperature 0 the token is the most probable one and its confidence the untempered softmax probability; above 0 the
token is drawn (after temperature, ``top_k``, ``top_p``, in this order) and the confidence is its probability under the
law it was drawn from. Rows do not see one another: a row without masks is never changed, and a row's draws depend on
its own keys alone.

References: Chang et al., "MaskGIT", arXiv 2202.04200 (most confident first); Wu et al., "Fast-dLLM", arXiv 2505.22618
(threshold); Ben-Hamu et al., "Accelerated sampling from masked diffusion models via entropy bounded unmasking", arXiv
2505.24857 (entropy bound, which there leaves out the largest entropy of the sum); Sahoo et al., arXiv 2406.07524
(ancestral).
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from genkit._checks import checked_count, checked_number, got
from genkit.errors import ConfigError, nearest
from genkit.samplers.noise import Keys
from genkit.schedulers.masked import (
    MaskedBlockScheduler,
    check_sampling_options,
    draw_tokens,
    greedy_tokens,
    sampling_logits,
)

__all__ = [
    "DecodingStrategy",
    "EntropyBound",
    "FixedSteps",
    "Margin",
    "Proposal",
    "Random",
    "SchedulerStrategy",
    "Sequential",
    "Threshold",
    "make_strategy",
]

_NO_TOKEN = -1  # stands for a mask inside a foreign scheduler, so that no id of the vocabulary is special


class Proposal(NamedTuple):
    """A token for every position, and how sure the model is of it.

    Args:
        tokens: int64 (B, n).
        confidence: probability of each token, float32 (B, n).
    """

    tokens: Tensor
    confidence: Tensor


@dataclass(frozen=True, kw_only=True)
class DecodingStrategy(ABC):
    """Base class of the strategies; immutable, and without state between passes.

    Args:
        temperature: 0: the most probable token; above 0: drawn from softmax(logits / temperature).
        top_k: draw from the ``top_k`` most probable tokens only; no effect at temperature 0.
        top_p: draw from the smallest set of tokens with at least this mass; no effect at temperature 0.

    Raises:
        ConfigError: an option of another type or range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        check_sampling_options(self.temperature, self.top_k, self.top_p)

    def sample(self, logits: Tensor, keys: Keys | None = None) -> Tensor:
        """One token a row, int64 (B,), of logits (B, V): the first token of a block. Reads the purpose ``"first"``.

        Raises:
            ConfigError: no keys at a temperature above 0.
        """
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        return draw_tokens(self._law(logits), self._keys(keys).at(purpose="first").uniform())[0]

    def propose(self, logits: Tensor, keys: Keys | None = None) -> Proposal:
        """A token and a confidence for every position of logits (B, n, V). Reads the purpose ``"tokens"``.

        Raises:
            ConfigError: no keys at a temperature above 0.
        """
        if self.temperature == 0:
            return Proposal(*greedy_tokens(logits))
        return Proposal(*self._drawn(self._law(logits), keys))

    @abstractmethod
    def reveal(self, logits: Tensor, tokens: Tensor, masked: Tensor, step: int = 0, keys: Keys | None = None) -> Tensor:
        """The tokens after one pass, int64 (B, n): some masked positions are filled in, all else is as it was.

        Every row that has masks loses at least one (:class:`Random` only at its last step).

        Args:
            logits: (B, n, V), aligned to ``tokens``, with −inf for the mask token.
            tokens: (B, n).
            masked: which positions are still to be revealed, bool (B, n).
            step: passes done in this block or part of a block, from 0.
            keys: the rows' random streams; another ``keys.at(step=…)`` for every pass of a walk. Not read at
                temperature 0 (except by :class:`Random`).

        Raises:
            ConfigError: tensors that do not fit one another, or no keys where numbers are drawn.
        """

    def _law(self, logits: Tensor) -> Tensor:
        """The logits of the distribution that tokens come from (untempered at temperature 0)."""
        return logits if self.temperature == 0 else sampling_logits(logits, self.temperature, self.top_k, self.top_p)

    def _drawn(self, law: Tensor, keys: Keys | None) -> tuple[Tensor, Tensor]:
        return draw_tokens(law, self._keys(keys).at(purpose="tokens").uniform(law.shape[1:-1]))

    def _tokens(self, law: Tensor, keys: Keys | None) -> Tensor:
        return law.max(dim=-1)[1] if self.temperature == 0 else self._drawn(law, keys)[0]

    def _keys(self, keys: Keys | None) -> Keys:
        if keys is None:
            raise ConfigError(
                f"{type(self).__name__} with temperature={self.temperature} draws numbers, but keys is None; expected "
                "Keys with one stream per row (draw_keys), or temperature=0"
            )
        return keys


@dataclass(frozen=True)
class Sequential(DecodingStrategy):
    """The leftmost masked position of each row: the order of an autoregressive model."""

    def reveal(self, logits: Tensor, tokens: Tensor, masked: Tensor, step: int = 0, keys: Keys | None = None) -> Tensor:
        """The leftmost masked position of each row is filled in."""
        _check_fit(logits, tokens, masked)
        first = masked & (masked.cumsum(dim=-1) == 1)
        return torch.where(first, self._tokens(self._law(logits), keys), tokens)


@dataclass(frozen=True)
class FixedSteps(DecodingStrategy):
    """The ⌈remaining / (steps − step)⌉ most confident masked positions of each row: done after ``steps`` passes.

    Args:
        steps: passes for a block or part of a block.
    """

    steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_count("steps", self.steps)

    def reveal(self, logits: Tensor, tokens: Tensor, masked: Tensor, step: int = 0, keys: Keys | None = None) -> Tensor:
        """The most confident masked positions are filled in, an equal share of a row's masks in each pass."""
        _check_fit(logits, tokens, masked)
        proposed, confidence = self.propose(logits, keys)
        left = max(self.steps - step, 1)
        share = torch.div(masked.sum(dim=-1, keepdim=True) + (left - 1), left, rounding_mode="floor")
        order = confidence.masked_fill(~masked, -1.0).argsort(dim=-1, descending=True, stable=True)
        return torch.where(masked & (order.argsort(dim=-1) < share), proposed, tokens)


@dataclass(frozen=True)
class Threshold(DecodingStrategy):
    """All masked positions whose confidence is above ``threshold``, and at least the most confident one.

    Args:
        threshold: a probability; above 1 each pass reveals one position a row, at 0 all.
    """

    threshold: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_number("threshold", self.threshold, "a number, at least 0", lambda v: 0 <= v < math.inf)

    def reveal(self, logits: Tensor, tokens: Tensor, masked: Tensor, step: int = 0, keys: Keys | None = None) -> Tensor:
        """All masked positions above the threshold, at least the most confident one of each row, are filled in."""
        _check_fit(logits, tokens, masked)
        proposed, confidence = self.propose(logits, keys)
        return _reveal_above(self.threshold, confidence, proposed, tokens, masked)


@dataclass(frozen=True)
class EntropyBound(DecodingStrategy):
    """The masked positions of smallest entropy while their entropies add up to at most ``bound``; at least one.

    The entropy is that of the distribution which tokens come from: untempered at temperature 0.

    Args:
        bound: nats, at least 0.
    """

    bound: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_number("bound", self.bound, "a number of nats, at least 0", lambda v: 0 <= v < math.inf)

    def reveal(self, logits: Tensor, tokens: Tensor, masked: Tensor, step: int = 0, keys: Keys | None = None) -> Tensor:
        """The longest prefix, by rising entropy, whose sum is within the bound (at least one position) is filled in."""
        _check_fit(logits, tokens, masked)
        law = self._law(logits)
        rising, order = _entropy(law).masked_fill(~masked, math.inf).sort(dim=-1, stable=True)
        chosen = rising.cumsum(dim=-1) <= self.bound
        chosen[..., 0] = True
        chosen = torch.zeros_like(masked).scatter_(-1, order, chosen)
        return torch.where(chosen & masked, self._tokens(law, keys), tokens)


@dataclass(frozen=True)
class Margin(DecodingStrategy):
    """As :class:`Threshold`, with the gap between the two most probable tokens as confidence.

    Args:
        threshold: a difference of probabilities; above 1 each pass reveals one position a row, at 0 all but ties.
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_number("threshold", self.threshold, "a number, at least 0", lambda v: 0 <= v < math.inf)

    def reveal(self, logits: Tensor, tokens: Tensor, masked: Tensor, step: int = 0, keys: Keys | None = None) -> Tensor:
        """All masked positions with a margin above the threshold, at least the one of widest margin, are filled in."""
        _check_fit(logits, tokens, masked)
        law = self._law(logits)
        top = law.softmax(dim=-1, dtype=torch.float32).topk(min(2, law.shape[-1]), dim=-1)[0]
        margin = top[..., 0] - top[..., 1] if top.shape[-1] > 1 else top[..., 0]
        return _reveal_above(self.threshold, margin, self._tokens(law, keys), tokens, masked)


@dataclass(frozen=True)
class Random(DecodingStrategy):
    """Ancestral: each masked position is revealed with probability 1/(steps − step), whatever the model thinks of it.

    At temperature 1 this is the kernel of :class:`MaskedBlockScheduler` from t = 1 − step/steps to t − 1/steps: a mask
    stays with probability s/t. A row may keep all its masks in a pass; after the last one none is left.

    Args:
        steps: passes for a block or part of a block.
    """

    steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_count("steps", self.steps)

    def reveal(self, logits: Tensor, tokens: Tensor, masked: Tensor, step: int = 0, keys: Keys | None = None) -> Tensor:
        """Each masked position is filled in with probability 1 − s/t. Reads the purposes ``"tokens"``, ``"reveal"``."""
        _check_fit(logits, tokens, masked)
        left = max(self.steps - step, 1)
        coin = self._keys(keys).at(purpose="reveal").uniform(masked.shape[1:])
        chosen = masked & (coin * left < 1.0) if left > 1 else masked
        return torch.where(chosen, self._tokens(self._law(logits), keys), tokens)


_STEP_OPTIONS = ("model_output", "timestep", "sample", "mask_token_id", "temperature", "top_p", "top_k", "generator")


@dataclass(frozen=True)
class SchedulerStrategy(DecodingStrategy):
    """The commits of a diffusers-style scheduler: its ``step(model_output, timestep, sample, *, mask_token_id=…, …)``.

    Takes diffusers' ``BlockRefinementScheduler`` (without editing) and :class:`MaskedBlockScheduler`; any other must
    commit at least one masked position of each row. At a temperature above 0 a foreign scheduler is called row by row,
    each with a generator seeded from the row's keys, which waits for the device; that of genkit reads the keys.

    Args:
        scheduler: a copy of it is used, so that its own timesteps are not touched.
        steps: steps over which a block, or part of one, is spread (at most one step a position); None takes the
            scheduler's ``num_inference_steps``.

    Raises:
        ConfigError: a scheduler without such a ``step``, or one that edits tokens which are not masked.
    """

    scheduler: Any
    steps: int | None = None  # an integer once the object is made

    def __post_init__(self) -> None:
        super().__post_init__()
        step = getattr(self.scheduler, "step", None)
        options = inspect.signature(step).parameters if callable(step) else {}
        missing = [name for name in _STEP_OPTIONS if name not in options]
        if isinstance(self.scheduler, type) or missing or not hasattr(self.scheduler, "set_timesteps"):
            raise ConfigError(
                f"{got(self.scheduler)} is no scheduler of masked blocks: expected an object with set_timesteps and "
                f"step({', '.join(_STEP_OPTIONS)}), such as MaskedBlockScheduler" + _lacking(missing)
            )
        editing = getattr(getattr(self.scheduler, "config", None), "editing_threshold", None)
        if editing is not None and editing > 0:
            raise ConfigError(
                f"editing_threshold={editing} edits tokens that are already revealed; "
                "expected a scheduler with editing_threshold=None, since a strategy only fills in masks"
            )
        steps = getattr(self.scheduler, "num_inference_steps", None) if self.steps is None else self.steps
        object.__setattr__(self, "steps", checked_count("steps", steps))
        object.__setattr__(self, "scheduler", copy.deepcopy(self.scheduler))

    def reveal(self, logits: Tensor, tokens: Tensor, masked: Tensor, step: int = 0, keys: Keys | None = None) -> Tensor:
        """The masked positions that the scheduler's ``step`` commits are filled in."""
        _check_fit(logits, tokens, masked)
        width = tokens.shape[-1]
        # more steps than positions would leave steps that commit nothing
        steps = min(self.steps or width, width)
        self.scheduler.set_timesteps(steps, device=tokens.device, block_length=width)
        after = self._stepped(logits, tokens.masked_fill(masked, _NO_TOKEN), step, keys)
        return torch.where(masked & (after != _NO_TOKEN), after, tokens)

    def _stepped(self, logits: Tensor, sample: Tensor, step: int, keys: Keys | None) -> Tensor:
        if self.temperature == 0:
            return self._call(logits, sample, step, None)
        keys = self._keys(keys)
        if isinstance(self.scheduler, MaskedBlockScheduler):
            return self._call(logits, sample, step, keys.at(purpose="tokens"))
        high, low = keys.at(purpose="scheduler").words(2).unbind(dim=1)
        seeds = ((high >> 1) << 32) + low
        generators = [torch.Generator(sample.device).manual_seed(seed) for seed in seeds.tolist()]
        rows = [self._call(logits[i : i + 1], sample[i : i + 1], step, g) for i, g in enumerate(generators)]
        return torch.cat(rows) if rows else sample

    def _call(self, logits: Tensor, sample: Tensor, step: int, generator: Any) -> Tensor:
        after = self.scheduler.step(
            logits,
            step,
            sample,
            mask_token_id=_NO_TOKEN,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            generator=generator,
            return_dict=False,
        )
        return after[0]


def make_strategy(strategy: Any, **options: Any) -> DecodingStrategy:
    """A strategy from its name, from a scheduler, or as it is.

    Args:
        strategy: ``"sequential"``, ``"fixed_steps"``, ``"threshold"``, ``"entropy_bound"``, ``"margin"``, ``"random"``;
            a strategy; or a scheduler for :class:`SchedulerStrategy`.
        options: the strategy's own options; beside a strategy they replace its own.

    Raises:
        ConfigError: an unknown name or option (with the nearest known one), or an option that is missing.
    """
    if isinstance(strategy, DecodingStrategy):
        _check_options(type(strategy), options, ())
        return dataclasses.replace(strategy, **options) if options else strategy
    if not isinstance(strategy, str):
        _check_options(SchedulerStrategy, options, ("scheduler",))
        return SchedulerStrategy(strategy, **options)
    if strategy not in _BY_NAME:
        known = ", ".join(_BY_NAME)
        raise ConfigError(f"strategy={strategy!r} is unknown; expected one of {known}.{nearest(strategy, _BY_NAME)}")
    kind = _BY_NAME[strategy]
    _check_options(kind, options, ())
    required = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING and f.name not in options]
    if required:
        raise ConfigError(
            f"strategy={strategy!r} needs {', '.join(required)}: make_strategy({strategy!r}, {required[0]}=…)"
        )
    return kind(**options)


_BY_NAME: dict[str, type[DecodingStrategy]] = {
    "sequential": Sequential,
    "fixed_steps": FixedSteps,
    "threshold": Threshold,
    "entropy_bound": EntropyBound,
    "margin": Margin,
    "random": Random,
}


def _check_options(kind: type[DecodingStrategy], options: dict[str, Any], given: tuple[str, ...]) -> None:
    known = [field.name for field in dataclasses.fields(kind) if field.name not in given]
    for name in options:
        if name not in known:
            raise ConfigError(
                f"{kind.__name__} has no option {name!r}; it has {', '.join(known)}.{nearest(name, known)}"
            )


def _lacking(missing: list[str]) -> str:
    return f" (its step lacks {', '.join(missing)})" if missing else ""


def _check_fit(logits: Tensor, tokens: Tensor, masked: Tensor) -> None:
    if not (logits.shape[:-1] == tokens.shape == masked.shape and masked.dtype == torch.bool and tokens.ndim == 2):
        raise ConfigError(
            f"logits has {got(logits)}, tokens {got(tokens)}, masked {got(masked)} and dtype {masked.dtype}; expected "
            "logits (B, n, V), tokens (B, n) and masked (B, n) of dtype torch.bool"
        )


def _reveal_above(threshold: float, confidence: Tensor, proposed: Tensor, tokens: Tensor, masked: Tensor) -> Tensor:
    """Masked positions with a confidence above the threshold, and the most confident masked one of each row."""
    confidence = confidence.masked_fill(~masked, -1.0)
    chosen = (confidence > threshold).scatter_(-1, confidence.argmax(dim=-1, keepdim=True), True)
    # a row without masks has a largest confidence too, at a token that is not to be overwritten
    return torch.where(chosen.logical_and_(masked), proposed, tokens)


def _entropy(logits: Tensor) -> Tensor:
    """−Σ p log p in nats, float32 (B, n); classes at −inf add 0."""
    log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)
    return -(log_probs.exp() * log_probs.clamp(min=-200.0)).sum(dim=-1)
