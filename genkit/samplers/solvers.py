"""Solvers: one step of a walk, as pure functions with their history passed in and out.

In a walk the samples share their times, but every formula here takes one t and one s per sample. With x̂_0 the clean
prediction, λ = log(α/σ) and h = λ_s − λ_t:

=============  =====  ===========================================================================================
name           order  step
=============  =====  ===========================================================================================
``euler``      1      the scheduler's deterministic kernel (DDIM; for the flow the Euler step)
``ancestral``  1      a sample of the scheduler's kernel with stochasticity η
``heun``       2      x + (s − t)(v_t + v_s)/2
``midpoint``   2      x + (s − t) v_m at the middle time m
``dpmpp_2s``   2      (σ_s/σ_t) x − α_s(e^{−h} − 1) [(1 − 1/2r) x̂_0(t) + (1/2r) x̂_0(m)],  r = (λ_m − λ_t)/h
``dpmpp_2m``   2      (σ_s/σ_t) x − α_s(e^{−h} − 1) [x̂_0(t) + (h/2h') (x̂_0(t) − x̂_0(t'))], h' the last step's h
``unipc``      3      the same predictor; x_t is first corrected with the evaluation at x_t itself (B(h) = e^h − 1)
=============  =====  ===========================================================================================

References: Karras et al., arXiv 2206.00364 (Heun); Lu et al., "DPM-Solver++", arXiv 2211.01095, algorithms 1 and 2;
Zhao et al., "UniPC", arXiv 2302.04867, eq. 5 and 8. Where λ_t is infinite (pure noise) ``dpmpp_2m`` and ``unipc`` take
their first-order step and ``dpmpp_2s`` the limit r → 1; that costs no order, since it happens once.

The last step onto t = 0 is an Euler step for all: it is exact where x̂_0 no longer depends on x_t, and otherwise its
error is of the order of σ² at the last time before 0. With σ ~ t that is O(h²); with the ``linear`` and
``scaled_linear`` levels, where σ² ~ t, it is O(h), which caps the order of a whole walk at 1 whatever the solver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from genkit._checks import checked_eta
from genkit.errors import ConfigError, nearest
from genkit.schedulers.transition import distinct, linear_combination

__all__ = ["SOLVERS", "ChainSolver", "Solver", "SolverState", "make_solver"]

Cond = Mapping[str, Tensor] | None
Context = Mapping[str, Tensor] | None
Denoiser = Callable[[Any, Tensor, Cond], Any]


class SolverState(NamedTuple):
    """What a step returns beside the new state.

    Args:
        evaluation: (model output, t, x) of the step's first network call; the clean prediction is read off it on
            demand.
        transition: the kernel the step was drawn from, for one-evaluation steps, else None.
        history: the solver's own tensors: all that the next step receives.
    """

    evaluation: tuple[Any, Tensor, Any] | None = None
    transition: Any = None
    history: tuple[Tensor, ...] = ()


class Solver(Protocol):
    """One step of a walk.

    Attributes:
        evaluations: network calls per step; a walk ends onto t = 0 with an Euler step where it is above 1.
        stochastic: whether the step reads noise.
    """

    evaluations: int
    stochastic: bool

    def init(self, x: Any) -> SolverState:
        """The state before the first step from ``x``."""
        ...

    def step(
        self,
        denoiser: Denoiser,
        scheduler: Any,
        x: Any,
        t: Tensor,
        s: Tensor,
        state: SolverState,
        cond: Cond,
        context: Context,
        noise: Any,
    ) -> tuple[Any, SolverState]:
        """x_t → (x_s, state); ``t`` and ``s`` are (B,), ``noise`` is the step's :class:`~genkit.samplers.Keys`."""
        ...


@dataclass(frozen=True)
class _Chain:
    """What a step knows beside its state and times."""

    denoiser: Denoiser
    scheduler: Any
    cond: Cond
    context: Context
    noise: Any
    batch: tuple[int, ...]

    def evaluate(self, x: Any, t: Tensor) -> Any:
        return self.denoiser(x, t.expand(self.batch), self.cond)

    def clean(self, output: Tensor, t: Tensor, x: Tensor) -> Tensor:
        return self.scheduler.to_x0(output, t, x, self.context)

    def velocity(self, output: Tensor, t: Tensor, x: Tensor) -> Tensor:
        return self.scheduler.velocity(output, t, x, self.context)

    def level(self, t: Tensor) -> _Level:
        """The noise level at scale 1: a clock's scale only shifts λ, and the formulas use differences and ratios."""
        alpha, sigma = self.scheduler.alpha_sigma(t)
        return _Level(alpha, sigma, torch.log(alpha) - torch.log(sigma))


class _Level(NamedTuple):
    """α, σ and λ = log(α/σ) at one time."""

    alpha: Tensor
    sigma: Tensor
    half_log_snr: Tensor

    def exponential_to(self, s: _Level) -> tuple[Tensor, Tensor]:
        """k, c of x_s = k x_t + c x̂_0 with k = σ_s/σ_t, c = α_s − k α_t: exact for a constant clean prediction."""
        kept = s.sigma / self.sigma
        return kept, s.alpha - self.alpha * kept


class ChainSolver:
    """Base class of the solvers here: a step is written for a chain, with times that all samples share given once."""

    evaluations = 1
    stochastic = False

    def init(self, x: Any) -> SolverState:
        """No history."""
        return SolverState()

    def step(
        self,
        denoiser: Denoiser,
        scheduler: Any,
        x: Any,
        t: Tensor,
        s: Tensor,
        state: SolverState,
        cond: Cond,
        context: Context,
        noise: Any,
    ) -> tuple[Any, SolverState]:
        """x_t → (x_s, state), see :class:`Solver`."""
        chain = _Chain(denoiser, scheduler, cond, context, noise, tuple(t.shape))
        return self._step(chain, x, distinct(t), distinct(s), state.history)

    def _step(
        self, chain: _Chain, x: Any, t: Tensor, s: Tensor, history: tuple[Tensor, ...]
    ) -> tuple[Any, SolverState]:
        raise NotImplementedError


class EulerSolver(ChainSolver):
    """The deterministic one-evaluation step."""

    def _step(
        self, chain: _Chain, x: Any, t: Tensor, s: Tensor, history: tuple[Tensor, ...]
    ) -> tuple[Any, SolverState]:
        output = chain.evaluate(x, t)
        kernel = chain.scheduler.transition(output, t, s, x, chain.context, 0.0)
        return kernel.mode, SolverState((output, t, x), kernel)


class AncestralSolver(ChainSolver):
    """A sample of the scheduler's kernel with stochasticity ``eta`` (None: the scheduler's own)."""

    stochastic = True

    def __init__(self, eta: float | None = None) -> None:
        self.eta = None if eta is None else checked_eta(eta)

    def _step(
        self, chain: _Chain, x: Any, t: Tensor, s: Tensor, history: tuple[Tensor, ...]
    ) -> tuple[Any, SolverState]:
        output = chain.evaluate(x, t)
        kernel = chain.scheduler.transition(output, t, s, x, chain.context, self.eta)
        return kernel.sample(chain.noise), SolverState((output, t, x), kernel)


class HeunSolver(ChainSolver):
    """The trapezoidal rule on the probability-flow velocity."""

    evaluations = 2

    def _step(
        self, chain: _Chain, x: Tensor, t: Tensor, s: Tensor, history: tuple[Tensor, ...]
    ) -> tuple[Tensor, SolverState]:
        output = chain.evaluate(x, t)
        slope = chain.velocity(output, t, x)
        one, dt = torch.ones_like(t), s - t
        ahead = linear_combination((one, x), (dt, slope))
        end_slope = chain.velocity(chain.evaluate(ahead, s), s, ahead)
        x_s = linear_combination((one, x), (0.5 * dt, slope), (0.5 * dt, end_slope))
        return x_s, SolverState((output, t, x))


class MidpointSolver(ChainSolver):
    """The midpoint rule on the probability-flow velocity."""

    evaluations = 2

    def _step(
        self, chain: _Chain, x: Tensor, t: Tensor, s: Tensor, history: tuple[Tensor, ...]
    ) -> tuple[Tensor, SolverState]:
        output = chain.evaluate(x, t)
        middle, one = _middle(t, s), torch.ones_like(t)
        x_m = linear_combination((one, x), (middle - t, chain.velocity(output, t, x)))
        slope = chain.velocity(chain.evaluate(x_m, middle), middle, x_m)
        return linear_combination((one, x), (s - t, slope)), SolverState((output, t, x))


class DPMSolverPP2S(ChainSolver):
    """DPM-Solver++ (2S), singlestep, with its middle point at the middle time."""

    evaluations = 2

    def _step(
        self, chain: _Chain, x: Tensor, t: Tensor, s: Tensor, history: tuple[Tensor, ...]
    ) -> tuple[Tensor, SolverState]:
        output = chain.evaluate(x, t)
        clean_t, middle = chain.clean(output, t, x), _middle(t, s)
        at_t, at_m, at_s = (chain.level(time) for time in (t, middle, s))
        kept, gain = at_t.exponential_to(at_m)
        x_m = linear_combination((kept, x), (gain, clean_t))
        clean_m = chain.clean(chain.evaluate(x_m, middle), middle, x_m)
        lambda_t, lambda_m, lambda_s = (level.half_log_snr for level in (at_t, at_m, at_s))
        ratio = torch.where(torch.isfinite(lambda_t), (lambda_s - lambda_t) / (lambda_m - lambda_t), 1.0)
        kept, gain = at_t.exponential_to(at_s)
        x_s = linear_combination((kept, x), (gain * (1.0 - 0.5 * ratio), clean_t), (gain * 0.5 * ratio, clean_m))
        return x_s, SolverState((output, t, x))


class DPMSolverPP2M(ChainSolver):
    """DPM-Solver++ (2M), multistep: one evaluation a step. History: x̂_0(t') and t' of the last step."""

    def init(self, x: Tensor) -> SolverState:
        """No last step: its time is NaN."""
        return SolverState(history=(torch.zeros_like(x), _no_time(x)))

    def _step(
        self, chain: _Chain, x: Tensor, t: Tensor, s: Tensor, history: tuple[Tensor, ...]
    ) -> tuple[Tensor, SolverState]:
        output = chain.evaluate(x, t)
        clean, (last_clean, last_t) = chain.clean(output, t, x), history
        at_last, at_t, at_s = (chain.level(time) for time in (distinct(last_t), t, s))
        weight = _extrapolation(at_last, at_t, at_s)
        kept, gain = at_t.exponential_to(at_s)
        x_s = linear_combination((kept, x), (gain * (1.0 + weight), clean), (-gain * weight, last_clean))
        return x_s, SolverState((output, t, x), None, (clean, t.expand(chain.batch)))


class UniPCSolver(ChainSolver):
    """UniPC of order 2 with B(h) = e^h − 1 ("bh2"): corrects x_t with the new evaluation, then predicts x_s.

    The corrector's step from t' to t and the predictor's differ in the clean prediction they use; their difference is
    added to x_t, so that what a callback did to x_t stays. History: x̂_0(t'), x̂_0(t''), t', t''.
    """

    def init(self, x: Tensor) -> SolverState:
        """No last steps: their times are NaN."""
        zeros, never = torch.zeros_like(x), _no_time(x)
        return SolverState(history=(zeros, zeros, never, never))

    def _step(
        self, chain: _Chain, x: Tensor, t: Tensor, s: Tensor, history: tuple[Tensor, ...]
    ) -> tuple[Tensor, SolverState]:
        output = chain.evaluate(x, t)
        clean, (clean_1, clean_2, t_1, t_2) = chain.clean(output, t, x), history
        at_2, at_1, at_t, at_s = (chain.level(distinct(time)) for time in (t_2, t_1, t, s))
        rho_1, rho_2 = _corrector_weights(at_2, at_1, at_t)
        rho_1 = rho_1 + _extrapolation(at_2, at_1, at_t)
        weight = _extrapolation(at_1, at_t, at_s)
        kept, gain = at_t.exponential_to(at_s)
        moved = at_1.exponential_to(at_t)[1] * kept  # what the correction of x_t adds to x_s
        moved = torch.where(torch.isnan(moved), 0.0, moved)
        x_s = linear_combination(
            (kept, x),
            (gain * (1.0 + weight) + moved * rho_2, clean),
            (-gain * weight - moved * (rho_1 + rho_2), clean_1),
            (moved * rho_1, clean_2),
        )
        return x_s, SolverState((output, t, x), None, (clean, clean_1, t.expand(chain.batch), t_1))


def _middle(t: Tensor, s: Tensor) -> Tensor:
    """The middle time, rounded to float32: what the network is told is what the formula uses."""
    return (0.5 * (t + s)).to(torch.float32).to(t.dtype)


def _no_time(x: Tensor) -> Tensor:
    dtype = torch.float32 if x.device.type in ("mps", "xpu") else torch.float64
    return torch.full((), float("nan"), dtype=dtype, device=x.device).expand(x.shape[0])


def _extrapolation(last: _Level, at_t: _Level, at_s: _Level) -> Tensor:
    """h/2h' of x̂_0 + (h/2h')(x̂_0 − x̂_0'), and 0 where there is no finite h or h'."""
    h, last_h = at_s.half_log_snr - at_t.half_log_snr, at_t.half_log_snr - last.half_log_snr
    return torch.where(torch.isfinite(h) & torch.isfinite(last_h), 0.5 * h / last_h, 0.0)


def _corrector_weights(at_2: _Level, at_1: _Level, at_t: _Level) -> tuple[Tensor, Tensor]:
    """UniC: ρ_1, ρ_2 of the clean prediction to use from t' to t once x̂_0(t) is known.

    x̂_0' + ρ_1 (x̂_0'' − x̂_0') + ρ_2 (x̂_0 − x̂_0'); with r = (λ'' − λ')/h < 0 they solve r ρ_1 + ρ_2 = b_1,
    r² ρ_1 + ρ_2 = b_2 (eq. 8 with B(h) = e^h − 1 for data prediction); ρ_1 = 0, ρ_2 = ½ with one past value.
    """
    h = at_t.half_log_snr - at_1.half_log_snr
    scale = -torch.expm1(-h)
    phi = scale / h
    b_1 = (1.0 - phi) / scale
    b_2 = 2.0 * ((1.0 - phi) / h - 0.5) / -scale
    r = (at_2.half_log_snr - at_1.half_log_snr) / h
    usable = torch.isfinite(h) & torch.isfinite(r)
    rho_1 = torch.where(usable, (b_1 - b_2) / (1.0 - r) / r, 0.0)
    rho_2 = torch.where(usable, (b_2 - r * b_1) / (1.0 - r), 0.5)
    return rho_1, rho_2


SOLVERS: dict[str, Callable[[], Solver]] = {
    "euler": EulerSolver,
    "heun": HeunSolver,
    "midpoint": MidpointSolver,
    "ancestral": AncestralSolver,
    "dpmpp_2s": DPMSolverPP2S,
    "dpmpp_2m": DPMSolverPP2M,
    "unipc": UniPCSolver,
}


_MEMBERS = ("evaluations", "stochastic", "init", "step")


def make_solver(solver: str | Solver, eta: float | None = None) -> Solver:
    """The solver of a name, or a :class:`Solver` as it is.

    Raises:
        ConfigError: an unknown name, no solver at all, ``eta`` outside [0, 1], or ``eta`` > 0 with a solver other than
            ``ancestral``.
    """
    if isinstance(solver, str) and solver not in SOLVERS:
        raise ConfigError(
            f"solver={solver!r} is unknown; expected one of {', '.join(SOLVERS)}." + nearest(solver, SOLVERS)
        )
    if not isinstance(solver, str) and (isinstance(solver, type) or not all(hasattr(solver, n) for n in _MEMBERS)):
        kind = f"the class {solver.__name__}" if isinstance(solver, type) else f"a {type(solver).__name__}"
        raise ConfigError(f"solver is {kind}; expected a Solver object or one of {', '.join(SOLVERS)}")
    if solver == "ancestral":
        return AncestralSolver(eta)
    if eta is not None and checked_eta(eta) > 0:
        name = repr(solver) if isinstance(solver, str) else type(solver).__name__
        raise ConfigError(f"eta={eta} acts only in the solver 'ancestral', not in {name}; drop it or change the solver")
    return SOLVERS[solver]() if isinstance(solver, str) else solver
