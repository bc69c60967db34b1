"""Guided proposals: draw edges from a guided kernel, weigh them back to the base, and choose how much guidance the
weights can bear.

With the guided output g = u + γ (c − u) of classifier-free guidance (u: the base's output, c: the conditional one) an
edge is drawn from q (made of g) with probability 1 − π₀ and from the base p with probability π₀, the *defensive
mixture*: weights stay below 1/π₀ an edge, whatever γ (Hesterberg, "Weighted average importance sampling and defensive
mixture distributions", Technometrics 1995; guidance: Ho, Salimans, arXiv 2207.12598).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from genkit._checks import checked_count, checked_number, got
from genkit.errors import ConfigError
from genkit.samplers.noise import Keys, draw_keys
from genkit.samplers.solvers import Cond, Denoiser
from genkit.samplers.tree.rows import stack_rows, take

if TYPE_CHECKING:
    from genkit.samplers.tree.chain import Chain

__all__ = ["GuidedProposal", "effective_share", "effective_shares", "tune_guidance"]


class GuidedProposal:
    """Classifier-free guidance as the proposal of a search.

    Args:
        cond: the condition, entries (1, \\*): one for all rows; entries that the search's own condition has as well
            are replaced, by these in the conditional pass and by ``null`` in the base's.
        null: what the base's pass gets in place of ``cond``: an entry for each of its names. By default zeros.
        guidance_scale: γ above 0 (1: the conditional kernel), one number or one for each macro-edge.
        base_probability: π₀, the share of edges drawn from the base itself.
        base: another network as the base; None: the same network told ``null``.
        name: what reports call the base.

    Raises:
        ConfigError: no condition, a guidance of 0 (which would ignore it silently), or a share outside [0, 1).
    """

    def __init__(
        self,
        cond: Mapping[str, Tensor],
        *,
        null: Mapping[str, Tensor] | None = None,
        guidance_scale: float | Sequence[float] = 2.0,
        base_probability: float = 0.3,
        base: Denoiser | None = None,
        name: str | None = None,
    ) -> None:
        if not cond:
            raise ConfigError("a guided proposal needs a condition; got none (leave proposal=None to search without)")
        self.cond = dict(cond)
        self.null = dict(null) if null is not None else {k: torch.zeros_like(v[:1]) for k, v in cond.items()}
        if self.null.keys() != self.cond.keys():
            raise ConfigError(f"null has the entries {sorted(self.null)}; expected those of cond, {sorted(self.cond)}")
        scales = [guidance_scale] if isinstance(guidance_scale, (int, float)) else list(guidance_scale)
        check = "a number, at least 0"
        self.scales = tuple(checked_number("guidance_scale", g, check, lambda v: v >= 0) for g in scales)
        if not any(self.scales):
            raise ConfigError("guidance_scale=0 ignores the condition; expected a number above 0, or no proposal")
        check = "a probability, at least 0 and below 1"
        self.base_probability = checked_number("base_probability", base_probability, check, lambda v: 0.0 <= v < 1.0)
        self.base = base
        self.base_name = name or ("the network without its condition" if base is None else type(base).__name__)

    @property
    def calls_per_step(self) -> int:
        """Network evaluations of a row in one micro-step."""
        return 2 if self.base is None else 3

    def outputs(self, denoiser: Denoiser, x: Any, t: Tensor, cond: Cond, edge: Tensor) -> tuple[Any, Any]:
        """The base's and the guided model output at rows (x, t) whose macro-edges are ``edge`` (B,), counted from 0."""
        rows = len(t)
        told = [self._condition(cond, entries, rows) for entries in (self.null, self.cond)]
        both = {name: torch.cat((told[0][name], told[1][name])) for name in told[0]}
        output = denoiser(stack_rows([x, x]), torch.cat((t, t)), both)
        without, conditional = take(output, slice(0, rows)), take(output, slice(rows, None))
        guided = _lerp(without, conditional, self._scale_of(edge))
        return (without if self.base is None else self.base(x, t, cond)), guided

    def _condition(self, cond: Cond, entries: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
        for name, value in entries.items():
            if len(value) not in (1, rows):
                raise ConfigError(
                    f"the proposal's condition {name!r} has {got(value)}; expected one row for all of a search's rows"
                )
        added = {k: v.expand(rows, *v.shape[1:]) for k, v in entries.items()}
        return {**(cond or {}), **added}

    def _scale_of(self, edge: Tensor) -> Tensor:
        scales = torch.tensor(self.scales, dtype=torch.float32, device=edge.device)
        if len(scales) == 1:
            return scales.expand(len(edge))
        if int(edge.max()) >= len(scales):
            raise ConfigError(f"guidance_scale has {len(scales)} entries; expected a number, or one a macro-edge")
        return scales[edge]

    def edge_log_weight(self, log_ratio: Tensor) -> Tensor:
        """log w = −log(π₀ + (1 − π₀) exp(−ℓ)), (B,), at most −log π₀."""
        share = self.base_probability
        guided = math.log1p(-share) - log_ratio
        if share == 0.0:
            return -guided
        return -torch.logaddexp(torch.full_like(log_ratio, math.log(share)), guided)

    def with_scales(self, scales: Sequence[float]) -> GuidedProposal:
        """The same proposal with another guidance, one number or one for each macro-edge (0 is the base's kernel)."""
        changed = copy.copy(self)
        changed.scales = tuple(float(scale) for scale in scales)
        return changed

    def describe(self) -> dict[str, Any]:
        """What a report records: base, scales and share."""
        return {"base": self.base_name, "guidance_scale": list(self.scales), "base_probability": self.base_probability}


def _lerp(a: Any, b: Any, weight: Tensor) -> Any:
    if isinstance(a, Mapping):
        return {name: _lerp(value, b[name], weight) for name, value in a.items()}
    weight = weight.to(a.dtype).reshape(-1, *[1] * (a.ndim - 1))
    # equal values are kept as they are, since −inf (a class that neither has) would become NaN
    return torch.where((a == b) | (weight == 0), a, torch.lerp(a, b, weight))


def effective_shares(log_weights: Tensor) -> Tensor:
    """The effective share of each row of log-weights (G, N), (G,); 0 where all weights are 0."""
    top = log_weights.amax(dim=1, keepdim=True)
    w = (log_weights - torch.where(top == -math.inf, 0.0, top)).exp()
    total = w.shape[1] * w.square().sum(dim=1)
    return w.sum(dim=1).square() / total.clamp(min=torch.finfo(total.dtype).tiny)


def effective_share(log_weights: Tensor) -> float:
    """(Σ w)² / (n Σ w²) of weights given by their logarithms (n,): 1 for equal ones, 1/n for one, 0 for none."""
    return float(effective_shares(log_weights.unsqueeze(0)))


def tune_guidance(
    chain: Chain,
    *,
    target: float = 0.5,
    num_samples: int = 64,
    iterations: int = 5,
    generator: torch.Generator | None = None,
    cond: Cond = None,
    context: Mapping[str, Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> tuple[GuidedProposal, int]:
    """For every macro-edge the largest guidance, up to the proposal's own, whose weights keep an effective share.

    Pilot samples are walked from the mixture; on each edge γ is bisected so that the edge's effective share
    (Σ w)²/(n Σ w²) stays at or above ``target``. The defensive mixture's share is at least π₀ whatever γ, as w ≤ 1/π₀.

    Args:
        chain: with a :class:`GuidedProposal`, whose scales are the upper ends.
        target: the least effective share of an edge, above the proposal's π₀ and below 1.
        num_samples: pilot samples.
        iterations: bisections of an edge.
        generator: for the pilot's noise.
        cond, context: as in a search, one row each.
        device: where states live.

    Returns:
        A proposal with one guidance an edge, and the network evaluations that finding it cost.

    Raises:
        ConfigError: no proposal, a target that every guidance or none keeps, or no guidance that keeps it on any edge.
    """
    if chain.proposal is None:
        raise ConfigError("tune_guidance got a chain without a proposal; expected one with a GuidedProposal")
    floor = chain.proposal.base_probability
    expected = f"a share above base_probability={floor:g}, which every guidance keeps, and below 1"
    target = checked_number("target", target, expected, lambda v: floor < v < 1.0)
    count = checked_count("num_samples", num_samples, "an integer, at least 2", 2)
    checked_count("iterations", iterations)
    rows = torch.zeros(count, dtype=torch.int64, device=device)
    pilot = _Pilot(chain, draw_keys(generator, count, device), take(cond, rows), take(context, rows))
    top = chain.proposal.scales
    scales = list(top) * len(chain.levels) if len(top) == 1 else list(top)
    state: Any = None
    for depth in range(1, chain.num_stages + 1):
        state = chain.draw_stage(depth, state, pilot.keys, pilot.context)
    for edge in range(len(chain.levels)):
        scales[edge], state = _largest_scale(pilot, edge, state, scales[edge], target, iterations)
    if not any(scales):
        raise ConfigError(f"no guidance keeps the effective share {target} on any edge; expected a lower target")
    return chain.proposal.with_scales(scales), pilot.evaluations


def _largest_scale(
    pilot: _Pilot, edge: int, state: Any, top: float, target: float, iterations: int
) -> tuple[float, Any]:
    """The largest guidance of an edge at or below ``top`` that keeps the target, and the states it leads to."""
    after, share = pilot.walk(edge, top, state)
    if share >= target:
        return top, after
    low, high, best = 0.0, top, pilot.walk(edge, 0.0, state)[0]
    for _ in range(iterations):
        middle = 0.5 * (low + high)
        after, share = pilot.walk(edge, middle, state)
        if share >= target:
            low, best = middle, after
        else:
            high = middle
    return low, best


@dataclass
class _Pilot:
    """Samples that are walked to find out what the weights of an edge can bear."""

    chain: Chain
    keys: Keys
    cond: Cond
    context: Mapping[str, Tensor] | None
    evaluations: int = 0

    def walk(self, edge: int, scale: float, state: Any) -> tuple[Any, float]:
        """The states after one edge drawn from the mixture at one guidance, and its weights' effective share."""
        proposal = cast(GuidedProposal, self.chain.proposal).with_scales([scale])
        chain = self.chain.with_proposal(proposal)
        guided, rows = chain.draw_branch(self.keys, chain.num_stages + edge), len(self.keys)
        total = torch.zeros(rows, dtype=torch.float64, device=guided.device)
        for k in range((0, *chain.levels)[edge], chain.levels[edge]):
            state, ratio = chain.step(
                state, torch.full_like(self.keys.key, k), guided, self.keys, self.cond, self.context
            )
            total = total + ratio
            self.evaluations += rows * chain.calls_per_step
        return state, effective_share(chain.edge_log_weight(total))
