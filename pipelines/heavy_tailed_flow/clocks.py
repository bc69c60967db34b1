"""Random clocks: the laws of the scale A in the source √A Z, as terminal values and as paths on a grid.

A Gaussian scale mixture x = √A Z has E exp(i⟨k, x⟩) = E exp(-A |k|²/2). A clock path T_s, 0 ≤ s ≤ 1, is non-decreasing
with T_0 = 0 and T_1 = A in law. Clock time s runs forward and has nothing to do with the flow's time t.

====================  =============================================  ===========================  =================
clock                 A                                              path                         tail index of x
====================  =============================================  ===========================  =================
:class:`GaussianClock`  1                                            T_s = s                      infinite
:class:`StableClock`    2c² S, S positive α/2-stable                 independent increments       α
:class:`StudentTClock`  1 / Gamma(ν/2, rate ν/2)                     A · gamma bridge             ν
:class:`SplicedClock`   a base clock, Pareto above its u0-quantile   the base path, rescaled      a chosen one
====================  =============================================  ===========================  =================

Every draw is keyed (:class:`genkit.samplers.noise.Keys`), one clock per sample, in float64 by inversion or Kanter's
formula, never by rejection: a sample's clock does not depend on the batch it sits in. The uniforms have 52 bits, so
draws reach the quantile 1 - 2^-53 at least and go no further than about that.

Differs from the paper in: the paper's text was not available (only its abstract), so the laws' normalisations, the
gamma bridge and the spliced tail are this project's choices.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from scipy.interpolate import CubicSpline
from torch import Tensor

from genkit.data.stable import log_kanter, stable_log_quantile, stable_tails
from genkit.errors import ConfigError, nearest
from genkit.samplers.noise import Keys

__all__ = ["Clock", "GaussianClock", "SplicedClock", "StableClock", "StudentTClock", "count_replaced"]

Array = NDArray[np.float64]
_TINY, _HUGE = float(np.finfo(np.float64).tiny), float(np.finfo(np.float64).max)


def _number(owner: str, name: str, value: object, low: float, high: float, expected: str) -> float:
    """``value`` as a float in (low, high], or a ConfigError that names the argument, what was got and the range."""
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not numeric or not low < float(value) <= high:  # type: ignore[arg-type]  # a nan fails both comparisons
        raise ConfigError(f"{owner}: {name} is {value!r}, expected {expected}")
    return float(value)  # type: ignore[arg-type]


def count_replaced(terminal: Tensor) -> tuple[int, int]:
    """How many values were too small, and too large, for float64 and were replaced by its smallest or largest one."""
    return int((terminal == _TINY).sum()), int((terminal == _HUGE).sum())


def _representable(law: str, value: Tensor) -> Tensor:
    """Zeros and infinities replaced by float64's smallest normal and largest value, with a warning that counts them.

    On an accelerator nothing is counted, since reading a count would make the step wait: see :func:`count_replaced`.
    """
    kept = value.clamp(_TINY, _HUGE)
    if kept.device.type != "cpu":
        return kept
    small, large = count_replaced(kept)
    if small or large:
        warnings.warn(
            f"{law} clock: of {kept.numel()} values {small} underflowed and {large} overflowed float64; they were "
            f"replaced by {_TINY:.1e} and {_HUGE:.1e}. Use a larger tail index.",
            stacklevel=3,
        )
    return kept


# the uniforms are at least 2^-53 away from 0 and 1, which is a logit of ±36.8
_LOGIT_END, _LOGIT_CELLS = 37.0, 8192


@lru_cache(maxsize=32)
def _log_gamma_spline(shape: float, device: torch.device) -> Tensor:
    """log g as a function of logit u, where P(g ≤ x) = u and g ~ Gamma(shape, 1): a cubic spline.

    Below e^-40 the law is P(g ≤ x) = x^shape / Γ(shape + 1) within rounding, which is inverted in logarithms, so that
    nothing underflows for a small shape.

    Returns:
        float64 (4, cells): the coefficients of each cell in powers of the offset from its start, the highest first.
    """
    logit = np.linspace(-_LOGIT_END, _LOGIT_END, _LOGIT_CELLS + 1)
    log_g = (special.log_expit(logit) + special.gammaln(shape + 1)) / shape
    # each half of (0, 1) through the function that keeps its relative accuracy
    low, high = (log_g >= -40) & (logit <= 0), (log_g >= -40) & (logit > 0)
    log_g[low] = np.log(special.gammaincinv(shape, special.expit(logit[low])))
    log_g[high] = np.log(special.gammainccinv(shape, special.expit(-logit[high])))
    return torch.from_numpy(CubicSpline(logit, log_g).c).to(device)


def _log_gamma_draw(shape: float, uniform: Tensor) -> Tensor:
    """log g for g ~ Gamma(shape, 1), by inversion at keyed uniforms (relative error of g below 1e-9)."""
    width = 2 * _LOGIT_END / _LOGIT_CELLS
    place = torch.log(uniform) - torch.log1p(-uniform) + _LOGIT_END
    cell = (place / width).long()
    offset = place - cell * width
    c3, c2, c1, c0 = _log_gamma_spline(shape, uniform.device)[:, cell]
    return ((c3 * offset + c2) * offset + c1) * offset + c0


class Clock(ABC):
    """The law of a random clock, as an immutable value.

    ``tail_index`` is that of x = √A Z: P(|x| > r) ~ r^(-tail_index), hence P(A > a) ~ a^(-tail_index/2).
    """

    law: ClassVar[str]

    if TYPE_CHECKING:  # a real property here would become the default of a dataclass field of the same name

        @property
        def tail_index(self) -> float: ...

    @abstractmethod
    def terminal(self, keys: Keys) -> Tensor:
        """The terminal value A of each sample's clock, float64 (B,), strictly positive and finite."""

    @abstractmethod
    def path(self, keys: Keys, grid: int) -> Tensor:
        """T at s = 0, 1/grid, …, 1: float64 (B, grid + 1), non-decreasing, 0 first; the last has the law of A.

        It equals ``terminal(keys)`` bit for bit, except for stable clocks on more than one cell: their increments are
        independent draws, and only the law agrees.
        """

    @abstractmethod
    def log_laplace(self, l: Tensor) -> Tensor:
        """log E exp(-l A) for l ≥ 0, float64, elementwise."""

    @abstractmethod
    def _tails(self, a: Array) -> tuple[Array, Array]:
        """P(A ≤ a) and P(A > a), each accurate where it is small."""

    @abstractmethod
    def _invert(self, lower: Array, upper: Array) -> Array:
        """a with P(A ≤ a) = lower and P(A > a) = upper; the smaller of the two decides."""

    def cdf(self, a: Tensor | float) -> Tensor:
        """P(A ≤ a), float64, elementwise."""
        return _through_numpy(lambda x: self._tails(x)[0], a)

    def sf(self, a: Tensor | float) -> Tensor:
        """P(A > a), float64, elementwise, with relative accuracy in the far tail."""
        return _through_numpy(lambda x: self._tails(x)[1], a)

    def quantile(self, u: Tensor | float) -> Tensor:
        """a with P(A ≤ a) = u for u in [0, 1], float64, elementwise."""
        return _through_numpy(lambda x: self._invert(x, 1 - x), _probabilities(u))

    def upper_quantile(self, q: Tensor | float) -> Tensor:
        """a with P(A > a) = q for q in [0, 1]: the quantile of 1 - q without the rounding of 1 - q."""
        return _through_numpy(lambda x: self._invert(1 - x, x), _probabilities(q))

    @cached_property
    def median(self) -> float:
        """The median of A."""
        return float(self._invert(np.asarray(0.5), np.asarray(0.5)))

    def splice(self, u0: float = 0.95, *, tail_index: float) -> SplicedClock:
        """This clock with another upper tail (:class:`SplicedClock`): the bulk keeps its values bit for bit."""
        return SplicedClock(self, u0=u0, tail_index=tail_index)

    def to_dict(self) -> dict[str, Any]:
        """The law and its parameters, ready for JSON; :meth:`from_dict` returns an equal clock."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"law": self.law, **{k: v.to_dict() if isinstance(v, Clock) else v for k, v in values.items()}}

    @staticmethod
    def from_dict(d: Mapping[str, Any]) -> Clock:
        """The clock that ``d`` describes: ``{"law": "stable", "alpha": 1.5}``.

        Raises:
            ConfigError: an unknown law or key (the nearest one is named), a missing key, an impossible value.
        """
        if not isinstance(d, Mapping) or "law" not in d:
            raise ConfigError(f"a clock is a mapping with the key 'law' (one of {', '.join(_LAWS)}), got {d!r}")
        if d["law"] not in _LAWS:
            raise ConfigError(f"unknown clock law {d['law']!r}; known: {', '.join(_LAWS)}.{nearest(d['law'], _LAWS)}")
        kind = _LAWS[d["law"]]
        values = {k: v for k, v in d.items() if k != "law"}
        _check_keys(kind, values)
        return kind(**{k: Clock.from_dict(v) if k == "base" else v for k, v in values.items()})


def _check_keys(kind: type[Clock], values: Mapping[str, Any]) -> None:
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            known = ", ".join(fields) or "none"
            raise ConfigError(f"unknown key {key!r} of clock {kind.law!r}; known: {known}.{nearest(key, fields)}")
    for name, f in fields.items():
        if name not in values and f.default is dataclasses.MISSING:
            raise ConfigError(f"clock {kind.law!r} needs {name!r}, got only {sorted(values)}")


def _through_numpy(function: Callable[[Array], Array], a: Tensor | float) -> Tensor:
    tensor = torch.as_tensor(a, dtype=torch.float64)
    result = np.asarray(function(tensor.detach().cpu().numpy()), dtype=np.float64)
    return torch.from_numpy(result.reshape(tensor.shape)).to(tensor.device)


def _probabilities(u: Tensor | float) -> Tensor:
    tensor = torch.as_tensor(u, dtype=torch.float64)
    if not bool(((tensor >= 0) & (tensor <= 1)).all()):
        raise ConfigError(f"probabilities must lie in [0, 1], got values from {tensor.min():g} to {tensor.max():g}")
    return tensor


def _laplace_argument(l: Tensor | float) -> Tensor:
    tensor = torch.as_tensor(l, dtype=torch.float64)
    if not bool((tensor >= 0).all()):
        raise ConfigError(
            f"log_laplace needs l >= 0 (E exp(-l A) is infinite below), got a minimum of {tensor.min():g}"
        )
    return tensor


def _grid_times(keys: Keys, grid: int) -> Tensor:
    """s = 0, 1/grid, …, 1, float64 (B, grid + 1)."""
    if not isinstance(grid, int) or grid < 1:
        raise ConfigError(f"grid is {grid!r}, expected the number of cells of the clock's path, at least 1")
    times = torch.arange(grid + 1, dtype=torch.float64, device=keys.key.device) / grid
    return times.expand(len(keys), grid + 1).clone()


def _constant_tails(value: float, a: Array) -> tuple[Array, Array]:
    below = np.where(np.isnan(a), np.nan, np.where(a >= value, 1.0, 0.0))
    return below, 1 - below


@dataclass(frozen=True)
class GaussianClock(Clock):
    """A = 1 and T_s = s: the source is N(0, I), and every number equals plain Gaussian flow matching's bit for bit."""

    law: ClassVar[str] = "gaussian"

    @property
    def tail_index(self) -> float:
        return math.inf

    def terminal(self, keys: Keys) -> Tensor:
        return torch.ones(len(keys), dtype=torch.float64, device=keys.key.device)

    def path(self, keys: Keys, grid: int) -> Tensor:
        return _grid_times(keys, grid)

    def log_laplace(self, l: Tensor) -> Tensor:
        return -_laplace_argument(l)

    def _tails(self, a: Array) -> tuple[Array, Array]:
        return _constant_tails(1.0, a)

    def _invert(self, lower: Array, upper: Array) -> Array:
        return np.ones_like(lower)


@dataclass(frozen=True)
class StableClock(Clock):
    """The clock of a symmetric α-stable source with characteristic function exp(-|c k|^α).

    Equation: A = 2c² S with S positive a-stable, a = α/2, so that E exp(-A |k|²/2) = exp(-(c² |k|²)^a). Increments over
    a cell of width 1/n are independent n^(-1/a) · 2c² S. At α = 2 the clock is the constant 2c².

    Args:
        alpha: stability index α in (0, 2].
        normalisation: "gaussian" takes c = 1/√2, so that A = 1 exactly at α = 2; "stable" takes c = ``scale``.
        scale: c, only with "stable".

    Raises:
        ConfigError: α outside (0, 2] or not a number, an unknown normalisation, a scale that would be ignored.
    """

    alpha: float
    normalisation: str = "gaussian"
    scale: float = 1.0
    law: ClassVar[str] = "stable"

    def __post_init__(self) -> None:
        alpha = _number("stable clock", "alpha", self.alpha, 0, 2, "a number in (0, 2] (2 is the Gaussian law)")
        scale = _number("stable clock", "scale", self.scale, 0, _HUGE, "a finite number above 0")
        if self.normalisation not in ("gaussian", "stable"):
            near = nearest(self.normalisation, ("gaussian", "stable"))
            raise ConfigError(f"normalisation is {self.normalisation!r}, expected 'gaussian' or 'stable'.{near}")
        if self.normalisation == "gaussian" and scale != 1.0:
            raise ConfigError(f"scale = {scale} has no meaning with normalisation='gaussian' (c = 1/√2); use 'stable'")
        object.__setattr__(self, "alpha", alpha)
        object.__setattr__(self, "scale", scale)
        if alpha < 0.5:
            warnings.warn(
                f"stable clock: alpha = {alpha} < 0.5 gives clocks beyond 1e24, near float32's limit", stacklevel=3
            )

    @property
    def tail_index(self) -> float:
        return math.inf if self.alpha == 2 else self.alpha

    @property
    def _factor(self) -> float:
        """2c²: exactly 1 for the Gaussian normalisation."""
        return 1.0 if self.normalisation == "gaussian" else 2 * self.scale * self.scale

    def _draw(self, keys: Keys, shape: tuple[int, ...], log_factor: float) -> Tensor:
        uniform, other = keys.at(purpose="clock/stable").uniform((*shape, 2)).unbind(-1)
        return torch.exp(log_kanter(uniform, -torch.log(other), self.alpha) + log_factor)

    def terminal(self, keys: Keys) -> Tensor:
        if self.alpha == 2:
            return torch.full((len(keys),), self._factor, dtype=torch.float64, device=keys.key.device)
        return _representable(self.law, self._draw(keys, (), math.log(self._factor)))

    def path(self, keys: Keys, grid: int) -> Tensor:
        times = _grid_times(keys, grid)
        if self.alpha == 2:
            return self._factor * times
        increments = self._draw(keys, (grid,), math.log(self._factor) - 2 / self.alpha * math.log(grid))
        times[:, 1:] = _representable(self.law, torch.cumsum(increments, dim=1))
        return times

    def log_laplace(self, l: Tensor) -> Tensor:
        return -((self._factor * _laplace_argument(l)) ** (self.alpha / 2))

    def _tails(self, a: Array) -> tuple[Array, Array]:
        if self.alpha == 2:
            return _constant_tails(self._factor, a)
        with np.errstate(divide="ignore"):
            log_x = np.log(np.where(a < 0, 0.0, a)) - math.log(self._factor)
        return stable_tails(log_x, self.alpha)

    def _invert(self, lower: Array, upper: Array) -> Array:
        if self.alpha == 2:
            return np.full_like(lower, self._factor)
        with np.errstate(over="ignore"):
            return self._factor * np.exp(stable_log_quantile(lower, upper, self.alpha))


@dataclass(frozen=True)
class StudentTClock(Clock):
    """The clock of a multivariate Student-t source with ν degrees of freedom.

    Equation: A = 1/G with G ~ Gamma(ν/2, rate ν/2), drawn by inversion. Its increments have no simple sampler, so the
    path is T_s = A · (gamma bridge): normalised increments Dirichlet(κ/n, …, κ/n) independent of A, hence T_1 = A
    exactly.

    Args:
        nu: degrees of freedom ν > 0, finite.
        bridge: concentration κ > 0 of the gamma bridge; small values put the clock into few jumps, large ones make it
            linear.

    Raises:
        ConfigError: ν or κ not a finite positive number.
    """

    nu: float
    bridge: float = 1.0
    law: ClassVar[str] = "student_t"

    def __post_init__(self) -> None:
        finite = "a finite number above 0"
        nu = _number("student_t clock", "nu", self.nu, 0, _HUGE, f"{finite} (the Gaussian law is GaussianClock)")
        object.__setattr__(self, "nu", nu)
        object.__setattr__(self, "bridge", _number("student_t clock", "bridge", self.bridge, 0, _HUGE, finite))
        if nu < 0.5:
            warnings.warn(
                f"student_t clock: nu = {nu} < 0.5 gives clocks beyond 1e24, near float32's limit", stacklevel=3
            )

    @property
    def tail_index(self) -> float:
        return self.nu

    def terminal(self, keys: Keys) -> Tensor:
        uniform = keys.at(purpose="clock/u").uniform()
        log_a = math.log(self.nu / 2) - _log_gamma_draw(self.nu / 2, uniform)
        return _representable(self.law, torch.exp(log_a))

    def path(self, keys: Keys, grid: int) -> Tensor:
        times = _grid_times(keys, grid)
        log_g = _log_gamma_draw(self.bridge / grid, keys.at(purpose="clock/bridge").uniform((grid,)))
        bridge = torch.cumsum(torch.softmax(log_g, dim=1), dim=1)
        times[:, 1:] = bridge / bridge[:, -1:] * self.terminal(keys).unsqueeze(1)
        return times

    def log_laplace(self, l: Tensor) -> Tensor:
        return _through_numpy(lambda x: _log_laplace_inverse_gamma(x, self.nu / 2), _laplace_argument(l))

    def _tails(self, a: Array) -> tuple[Array, Array]:
        half = self.nu / 2
        with np.errstate(divide="ignore"):
            g = half / np.where(a < 0, 0.0, a)
        return special.gammaincc(half, g), special.gammainc(half, g)

    def _invert(self, lower: Array, upper: Array) -> Array:
        half = self.nu / 2
        small = special.gammainccinv(half, np.minimum(lower, 0.5))
        with np.errstate(divide="ignore"):
            return half / np.where(lower < upper, small, special.gammaincinv(half, upper))


def _log_laplace_inverse_gamma(l: Array, v: float) -> Array:
    """log E exp(-l/G), G ~ Gamma(v, rate v): log [2 (vl)^(v/2) K_v(2 √(vl)) / Γ(v)].

    From v = 25 on by the uniform (Debye) expansion of K_v, combined with Stirling's series so that nothing large
    cancels.
    """
    if v >= 25:
        return _debye(l, v)
    z = 2 * np.sqrt(v * l)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = math.log(2) + v * np.log(z / 2) + np.log(special.kve(v, z)) - z - special.gammaln(v)
    return np.where(np.isfinite(value), value, 0.0)  # z so small that K_v overflows: E exp(-lA) = 1


def _debye(l: Array, v: float) -> Array:
    """The large-v form of :func:`_log_laplace_inverse_gamma` (four terms: below 1e-8)."""
    s = np.sqrt(1 + 4 * l / v)
    excess = 4 * l / v / (s + 1)  # s - 1
    t = 1 / s
    u1 = t * (3 - 5 * t**2) / 24
    u2 = t**2 * (81 - 462 * t**2 + 385 * t**4) / 1152
    u3 = t**3 * (30375 - 369603 * t**2 + 765765 * t**4 - 425425 * t**6) / 414720
    u4 = t**4 * (4465125 - 94121676 * t**2 + 349922430 * t**4 - 446185740 * t**6 + 185910725 * t**8) / 39813120
    series = np.log1p(-u1 / v + u2 / v**2 - u3 / v**3 + u4 / v**4)
    stirling = 1 / (12 * v) - 1 / (360 * v**3) + 1 / (1260 * v**5)
    return v * (np.log1p(excess / 2) - excess) - np.log(s) / 2 + series - stirling


@dataclass(frozen=True)
class SplicedClock(Clock):
    """A base clock whose upper tail is replaced by a Pareto tail: the bulk stays, the tail index is free.

    Equation, with q0 the base clock's u0-quantile and u = P(base ≤ a)::

        A = a                                     for a ≤ q0 (bit for bit)
        A = q0 ((1 - u)/(1 - u0))^(-2/tail_index) above

    The base draw's own u is used, so for the same keys A increases with the base draw and decreases as ``tail_index``
    grows. A path is the base path rescaled to the new terminal value.

    Args:
        base: the clock to change; a constant clock (Gaussian, or stable with α = 2) has no tail and is refused.
        u0: the probability below which nothing changes, in (0, 1).
        tail_index: the new tail index of x, above 0 and finite.

    Raises:
        ConfigError: a constant base clock, u0 or tail_index outside its range.
    """

    base: Clock
    u0: float = 0.95
    tail_index: float = dataclasses.field(kw_only=True)
    law: ClassVar[str] = "spliced"

    def __post_init__(self) -> None:
        if not isinstance(self.base, Clock):
            raise ConfigError(f"spliced clock: base is a {type(self.base).__name__}, expected a clock")
        if math.isinf(self.base.tail_index):
            raise ConfigError(
                f"a {self.base.law!r} clock with a constant A has no tail to replace; splice a StudentTClock or a "
                f"StableClock with alpha < 2 (and train with it)"
            )
        inside = "a number strictly between 0 and 1"
        u0 = _number("spliced clock", "u0", self.u0, 0, math.nextafter(1, 0), inside)
        index = _number("spliced clock", "tail_index", self.tail_index, 0, _HUGE, "a finite number above 0")
        object.__setattr__(self, "u0", u0)
        object.__setattr__(self, "tail_index", index)

    @cached_property
    def threshold(self) -> float:
        """q0, the base clock's u0-quantile."""
        return float(self.base._invert(np.asarray(self.u0), np.asarray(1 - self.u0)))

    def _respliced(self, a: Tensor) -> Tensor:
        """The base clock's terminal values (B,) with the new tail."""
        above = a > self.threshold
        result = a.clone()
        share = self.base.sf(a[above]) / (1 - self.u0)
        result[above] = self.threshold * share.clamp(max=1.0) ** (-2 / self.tail_index)
        return _representable(self.law, result)

    def terminal(self, keys: Keys) -> Tensor:
        return self._respliced(self.base.terminal(keys))

    def path(self, keys: Keys, grid: int) -> Tensor:
        path = self.base.path(keys, grid)
        last = path[:, -1:]
        new = self._respliced(path[:, -1]).unsqueeze(1)
        return torch.where(new == last, path, path / last * new)

    def log_laplace(self, l: Tensor) -> Tensor:
        """log of E exp(-l base) + l ∫_q0^∞ e^(-la) [P(base > a) - P(A > a)] da, by the trapezoidal rule in log a."""
        rate = _laplace_argument(l)
        k = torch.arange(-40.0, 5.0, 0.1, dtype=torch.float64, device=rate.device).exp()
        a = self.threshold + k / rate.unsqueeze(-1)
        integrand = k * torch.exp(-k) * (self.base.sf(a) - self.sf(a))
        correction = torch.exp(-rate * self.threshold) * 0.1 * integrand.sum(-1)
        return torch.log(torch.exp(self.base.log_laplace(rate)) + correction)

    def _tails(self, a: Array) -> tuple[Array, Array]:
        cdf, sf = self.base._tails(a)
        above = a > self.threshold
        tail = (1 - self.u0) * (np.where(above, a, self.threshold) / self.threshold) ** (-self.tail_index / 2)
        return np.where(above, 1 - tail, cdf), np.where(above, tail, sf)

    def _invert(self, lower: Array, upper: Array) -> Array:
        share = upper / (1 - self.u0)
        with np.errstate(divide="ignore", over="ignore"):
            tail = self.threshold * np.minimum(share, 1.0) ** (-2 / self.tail_index)
        bulk = self.base._invert(np.minimum(lower, self.u0), np.maximum(upper, 1 - self.u0))
        return np.where(share < 1, tail, bulk)


_LAWS: dict[str, type[Clock]] = {kind.law: kind for kind in (GaussianClock, StableClock, StudentTClock, SplicedClock)}
