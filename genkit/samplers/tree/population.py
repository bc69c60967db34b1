"""Populations of walks on a search's chain: the baselines of a tree search, at the same count of network evaluations.

All take a :class:`~genkit.samplers.tree.chain.Chain` and a reward r, and aim at the base's law p tilted by the reward,
π*(x) = p(x) exp(λ r(x)) / Z with Z = E_p[exp(λ r)], or at high rewards alone:

* :func:`best_of_n`: independent walks, the best of each group of them;
* :func:`self_normalised`: independent walks with the weights w exp(λ r), and Z;
* :func:`smc`: particles that are resampled at the ends of the macro-edges by potentials G_l made of the reward of their
  clean predictions x̂_0 (Feynman–Kac steering, Singhal et al., arXiv 2501.06848)::

      "difference"   G_l = exp(λ_l r̂_l − λ_{l−1} r̂_{l−1})
      "max"          G_l = exp(λ_l max_{j ≤ l} r̂_j)

  and at the end by exp(λ r) / Π_l G_l along each particle's own past, so that the product of all potentials is exp(λ r)
  whatever the predictions were: weighted particles are unbiased for Z π* (Del Moral, "Feynman–Kac formulae", 2004);
* :func:`beam`: the best ``width`` of ``width · branch`` candidates at the end of each macro-edge.

A clean prediction uses the network evaluation that the next step needs anyway: a population of N rows makes
N · ``num_steps`` · ``calls_per_step`` evaluations, with or without potentials. With a guided proposal the edges carry
the base's weight, w = p / (mixture of p and q). All noise is keyed by the row, so nothing depends on ``slots`` or on
the network's batch size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from genkit._checks import checked_count, checked_number
from genkit.errors import ConfigError, nearest
from genkit.samplers.solvers import Cond
from genkit.samplers.tree.chain import Chain, Context
from genkit.samplers.tree.particles import (
    ParticleWalk,
    Population,
    PopulationResult,
    RewardFunction,
    Scale,
    Twist,
    best_rows,
    log_mean_exp,
    take_outputs,
    tilt,
)
from genkit.samplers.tree.proposals import effective_shares
from genkit.samplers.tree.rows import State, take

__all__ = ["POTENTIALS", "RESAMPLINGS", "Population", "PopulationResult", "beam", "best_of_n", "self_normalised", "smc"]

POTENTIALS = ("difference", "max", "final")
RESAMPLINGS = ("systematic", "multinomial")


@torch.no_grad()
def best_of_n(
    chain: Chain,
    reward: RewardFunction,
    num_rollouts: int,
    num_samples: int | None = None,
    *,
    weighted: bool = True,
    preference: Sequence[float] | Tensor | None = None,
    floor: float = -math.inf,
    generator: torch.Generator | None = None,
    cond: Cond = None,
    context: Context | None = None,
    slots: int = 64,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> PopulationResult:
    """Independent walks; the best of each of ``num_samples`` equal groups is delivered.

    Args:
        chain: what is walked.
        reward: (samples, context) → :class:`~genkit.rewards.RewardOutput`.
        num_rollouts: walks.
        num_samples: delivered rows, a divisor of ``num_rollouts``; None or ``num_rollouts``: all of them, unranked.
        weighted: True: edges are drawn from the chain's mixture of base and guided kernel, and ``log_weights`` are the
            base's against it, over the whole walk. False: all edges are guided and nothing is weighted (plain
            classifier-free guidance). Without a proposal both are the base itself. The ranking is by reward alone.
        preference: weights of the objectives (M,) in the ranking; needed where there are several.
        floor: what a sample without a valid reward counts as.
        generator: one int64 key is drawn from it; all noise is a function of that key and the row.
        cond, context: what denoiser and kernel (and reward) are told: one row for all, or one a delivered row.
        slots: rows that are walked at once.
        device: where states live.
        progress: show a progress bar.

    Raises:
        ConfigError: arguments that do not fit. What the reward raises surfaces as it is.
    """
    rows = checked_count("num_rollouts", num_rollouts)
    chosen = rows if num_samples is None else checked_count("num_samples", num_samples)
    if rows % chosen:
        raise ConfigError(f"num_rollouts={rows}; expected a multiple of num_samples={chosen}, for groups of one size")
    walk = ParticleWalk.begin(chain, reward, chosen, rows // chosen, generator, cond, context, slots, device, progress)
    state, log_weights, ess = walk.rollouts(guided=not weighted)
    everyone = walk.judged(state, log_weights)
    index = torch.arange(rows, device=device)
    if chosen < rows:
        index = best_rows(Scale(preference, floor).score(everyone.rewards, everyone.valid), chosen, 1)
    return walk.result(everyone, index, ess)


@torch.no_grad()
def self_normalised(
    chain: Chain,
    reward: RewardFunction,
    num_rollouts: int,
    num_samples: int | None = None,
    *,
    lam: float,
    resampling: str = "systematic",
    preference: Sequence[float] | Tensor | None = None,
    floor: float = -math.inf,
    generator: torch.Generator | None = None,
    cond: Cond = None,
    context: Context | None = None,
    slots: int = 64,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> PopulationResult:
    """Independent walks with the weights w exp(λ r): Z, averages under the tilted law, and samples of it.

    Args:
        chain, reward, preference, generator, slots, device, progress: as for :func:`best_of_n`.
        num_rollouts: walks.
        num_samples: rows drawn (with repetition) by their weights; None: all walks with their weights.
        lam: λ, at least 0.
        resampling: how they are drawn, one of :data:`RESAMPLINGS`.
        floor: the reward of samples without a valid one; −inf gives them no weight.
        cond, context: one row for all.

    Raises:
        ConfigError: arguments that do not fit. What the reward raises surfaces as it is.
    """
    lam, resampling, scale = _checked_lam(lam), _known("resampling", resampling, RESAMPLINGS), Scale(preference, floor)
    rows = checked_count("num_rollouts", num_rollouts)
    walk = ParticleWalk.begin(chain, reward, 1, rows, generator, cond, context, slots, device, progress)
    state, log_weights, ess = walk.rollouts()
    values, valid = walk.judge(state)
    everyone = walk.population(state, values, valid, log_weights + tilt(scale.score(values, valid), lam))
    final = everyone.log_weights.unsqueeze(0)
    log_z = log_mean_exp(final)
    index = None if num_samples is None else walk.drawn(final, checked_count("num_samples", num_samples), resampling)
    ess = (*ess[:-1], float(effective_shares(final)))
    return walk.result(everyone, index, ess, log_z, everyone.log_weights)


@torch.no_grad()
def smc(
    chain: Chain,
    reward: RewardFunction,
    num_particles: int,
    num_samples: int | None = None,
    *,
    lam: float,
    num_groups: int = 1,
    potential: str = "difference",
    schedule: Sequence[float] | None = None,
    resampling: str = "systematic",
    ess_threshold: float = 0.5,
    preference: Sequence[float] | Tensor | None = None,
    floor: float = -math.inf,
    generator: torch.Generator | None = None,
    cond: Cond = None,
    context: Context | None = None,
    slots: int = 64,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> PopulationResult:
    """Sequential Monte Carlo with potentials made of the reward of clean predictions (Feynman–Kac steering).

    Args:
        chain, reward, preference, generator, slots, device, progress: as for :func:`best_of_n`.
        num_particles: particles of a group.
        num_samples: delivered rows, a multiple of ``num_groups``: each group draws its part of them by its particles'
            weights, and they carry the weight of their group's Z. None: all particles with their weights.
        lam: λ, at least 0.
        num_groups: independent populations side by side.
        potential: one of :data:`POTENTIALS`; ``"final"`` asks the reward of final samples only.
        schedule: λ_l / λ for each macro-edge, at least 0, the last one 1; None: all 1. The reward is not asked where
            it is 0.
        resampling: ``"systematic"`` or ``"multinomial"``.
        ess_threshold: a group is resampled at the end of a macro-edge when its effective share is below this; 0: never.
        floor: the reward of samples without a valid one; −inf gives them no weight at the end. A clean prediction
            without a valid reward counts as ``floor`` where that is finite, otherwise as the lowest one of its group:
            the sample that it leads to may be valid.
        cond, context: one row for all, or one a group.

    Raises:
        ConfigError: arguments that do not fit. What the reward raises surfaces as it is.
    """
    lam, resampling = _checked_lam(lam), _known("resampling", resampling, RESAMPLINGS)
    threshold = checked_number("ess_threshold", ess_threshold, "a share from 0 to 1", lambda v: 0.0 <= v <= 1.0)
    groups, size = checked_count("num_groups", num_groups), checked_count("num_particles", num_particles)
    part = _part_of(num_samples, groups)
    lams = [lam * fraction for fraction in _checked_schedule(schedule, len(chain.levels))]
    twist = Twist(_known("potential", potential, POTENTIALS), lams, Scale(preference, floor), groups, size, device)
    walk = ParticleWalk.begin(chain, reward, groups, size, generator, cond, context, slots, device, progress)
    state, log_z, log_weights, ess = _steered(walk, twist, resampling, threshold)
    values, valid = walk.judge(state)
    log_weights = log_weights + twist.last(values, valid, lam).reshape(groups, size)
    ess = (*ess, float(effective_shares(log_weights).mean()))
    log_z_groups = log_z + log_mean_exp(log_weights)
    final = log_z.unsqueeze(1) + log_weights
    everyone = walk.population(state, values, valid, final.reshape(-1))
    index = None if part is None else walk.drawn(final, part, resampling)
    return walk.result(everyone, index, ess, log_z_groups, log_z_groups if groups > 1 else None)


def _steered(
    walk: ParticleWalk, twist: Twist, resampling: str, threshold: float
) -> tuple[State, Tensor, Tensor, tuple[float, ...]]:
    """Particles at the end of the chain, log Z so far (G,), log-weights since the last resampling (G, N), and ESS."""
    chain, shape = walk.chain, (walk.num_groups, walk.size)
    (state, log_weights), outputs, ess = walk.start(), None, []
    log_weights = log_weights.reshape(shape)
    log_z = log_weights.new_zeros(walk.num_groups)
    for edge in walk.edges():
        guided = chain.draw_branch(walk.keys, chain.num_stages + edge)
        state, ratio = walk.advance(edge, state, guided, outputs)
        log_weights = log_weights + chain.edge_log_weight(ratio).reshape(shape)
        if edge == len(chain.levels) - 1:
            break
        outputs = None
        if twist.asks(edge):
            outputs, clean = walk.look_ahead(edge, state)
            log_weights = log_weights + twist.potential(edge, *walk.judge(clean)).reshape(shape)
        shares = effective_shares(log_weights)
        ess.append(float(shares.mean()))
        poor = shares < threshold
        if bool(poor.any()):
            ancestors = walk.ancestors(log_weights, walk.size, resampling, edge, poor)
            state, outputs = take(state, ancestors), take_outputs(outputs, ancestors)
            twist.follow(ancestors)
            log_z = torch.where(poor, log_z + log_mean_exp(log_weights), log_z)
            log_weights = torch.where(poor.unsqueeze(1), 0.0, log_weights)
    return state, log_z, log_weights, tuple(ess)


@torch.no_grad()
def beam(
    chain: Chain,
    reward: RewardFunction,
    width: int,
    num_samples: int | None = None,
    *,
    branch: int = 2,
    num_groups: int = 1,
    preference: Sequence[float] | Tensor | None = None,
    floor: float = -math.inf,
    generator: torch.Generator | None = None,
    cond: Cond = None,
    context: Context | None = None,
    slots: int = 64,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> PopulationResult:
    """Beam search: at the end of each macro-edge the best ``width`` candidates by the reward of their clean prediction.

    Each of them goes on as ``branch`` candidates; the samples have no weights (their law is none that is known).

    Args:
        chain, reward, preference, generator, slots, device, progress: as for :func:`best_of_n`.
        width: states that are kept, in each group.
        num_samples: delivered rows, the best of each group, a multiple of ``num_groups``; None: ``width`` a group.
        branch: candidates of each kept state.
        num_groups: independent beams side by side.
        floor: the reward of candidates without a valid one.
        cond, context: one row for all, or one a group.

    Raises:
        ConfigError: arguments that do not fit. What the reward raises surfaces as it is.
    """
    width, branch = checked_count("width", width), checked_count("branch", branch)
    groups, scale = checked_count("num_groups", num_groups), Scale(preference, floor)
    part = _part_of(num_samples, groups) or width
    if part > width * branch:
        raise ConfigError(f"num_samples={num_samples}; expected at most {width * branch} for each of {groups} groups")
    walk = ParticleWalk.begin(chain, reward, groups, width * branch, generator, cond, context, slots, device, progress)
    state, outputs = walk.start()[0], None
    for edge in walk.edges():
        guided = chain.draw_branch(walk.keys, chain.num_stages + edge)
        state, _ = walk.advance(edge, state, guided, outputs)
        if edge < len(chain.levels) - 1:
            outputs, clean = walk.look_ahead(edge, state)
            kept = best_rows(scale.score(*walk.judge(clean)), groups, width).repeat_interleave(branch)
            state, outputs = take(state, kept), take_outputs(outputs, kept)
    everyone = walk.judged(state)
    return walk.result(everyone, best_rows(scale.score(everyone.rewards, everyone.valid), groups, part))


def _checked_lam(lam: Any) -> float:
    return checked_number("lam", lam, "a finite number, at least 0", lambda v: 0.0 <= v < math.inf)


def _checked_schedule(schedule: Sequence[float] | None, edges: int) -> list[float]:
    fractions = [1.0] * edges if schedule is None else [float(fraction) for fraction in schedule]
    if len(fractions) != edges or fractions[-1] != 1.0 or not all(0.0 <= f < math.inf for f in fractions):
        raise ConfigError(
            f"schedule={fractions}; expected {edges} numbers, one a macro-edge, at least 0, the last one 1 (the "
            "target itself)"
        )
    return fractions


def _part_of(num_samples: Any, groups: int) -> int | None:
    """Delivered rows of each group; None for all."""
    if num_samples is None:
        return None
    if checked_count("num_samples", num_samples) % groups:
        raise ConfigError(f"num_samples={num_samples}; expected a multiple of num_groups={groups}")
    return int(num_samples) // groups


def _known(name: str, value: Any, known: Sequence[str]) -> str:
    if value not in known:
        raise ConfigError(f"{name}={value!r}; expected one of {', '.join(known)}.{nearest(str(value), known)}")
    return str(value)
