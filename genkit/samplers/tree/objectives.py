"""Scalarisations of several objectives: what a leaf of a search stores, and how a node is valued for a preference.

A reward has M objectives, a search maximises one number. Two ways between them:

* `PerObjective`: a leaf stores its M scaled rewards, the backup gives M soft values V^m, and each simulation draws a
  preference c on the simplex and values nodes by f_c(V¹, …, V^M). One search serves every preference, but f_c(V) only
  bounds the soft value of f_c(r): by Hölder's inequality

      Σ_m c_m (1/λ) log E exp(λ r_m)  >=  (1/λ) log E exp(λ Σ_m c_m r_m),

  with equality at leaves. It over-values nodes whose objectives are good in different descendants.
* `Directions`: a leaf stores f_c(r) for K fixed preferences, whose soft values the backup then gives exactly; each
  simulation draws one of the K.

The forms, with the weights c >= 0, Σ_m c_m = 1, and the ideal point u:

    linear         f_c(r) = Σ_m c_m r_m
    tchebycheff    f_c(r) = -max_m c_m (u_m - r_m) + ρ Σ_m c_m r_m      (augmented; reaches concave parts of a front)

All tensors are on the CPU, where the tree is kept.

**State.** Objects never change; two methods return a changed copy, and both are functions of the set of leaves alone,
whatever its order or division, so that a search that keeps its leaves' rewards can rebuild everything:

* `fit(rewards)` freezes the scale. Without ``bounds`` the 5 % and 95 % quantiles of the warm-up's rewards become 0 and
  1. Until then every leaf stores 0: the search follows the base chain. Afterwards the columns of all leaves have to be
  computed anew and backed up once.
* `observe(rewards)` moves the running ideal of `PerObjective`, a componentwise maximum. Stored columns do not depend
  on it. The ideal of `Directions` does not run, since its stored values do depend on it.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from genkit._checks import checked_count, checked_number, got
from genkit.errors import ConfigError, nearest
from genkit.samplers.noise import Keys

__all__ = ["SCALARISATION_FORMS", "Directions", "MultiObjective", "PerObjective", "das_dennis", "scalarise"]

SCALARISATION_FORMS = ("linear", "tchebycheff")

_QUANTILES = (0.05, 0.95)


def das_dennis(num_objectives: int, divisions: int) -> Tensor:
    """The simplex lattice of Das and Dennis: all weights whose entries are multiples of 1 / divisions.

    Args:
        num_objectives: M >= 1.
        divisions: H >= 1.

    Returns:
        float64 (n, M) with n = binomial(H + M - 1, M - 1), rows in lexicographic order, each of sum 1.

    Reference: Das, Dennis, "Normal-boundary intersection", SIAM J. Optim. 1998.
    """
    size, total = checked_count("num_objectives", num_objectives), checked_count("divisions", divisions)
    rows = torch.zeros(1, 0, dtype=torch.int64)
    for _ in range(size - 1):
        left = total - rows.sum(dim=1)
        parent = torch.repeat_interleave(torch.arange(len(rows)), left + 1)
        first = torch.cumsum(left + 1, dim=0) - (left + 1)
        rows = torch.cat((rows[parent], (torch.arange(len(parent)) - first[parent]).unsqueeze(1)), dim=1)
    return torch.cat((rows, total - rows.sum(dim=1, keepdim=True)), dim=1).double() / total


def scalarise(
    values: Tensor, weights: Tensor, *, form: str = "linear", ideal: Tensor | None = None, rho: float = 0.05
) -> Tensor:
    """f_c of the module's text.

    Args:
        values: (*, M), higher is better. A row with an entry of -inf is -inf under every preference.
        weights: (*, M), not negative; broadcast with the values.
        form: ``"linear"`` or ``"tchebycheff"``.
        ideal: (M,), needed by the latter.
        rho: its augmentation, >= 0; with 0 weakly dominated points tie with those that dominate them.

    Returns:
        (*), the broadcast shape without its last axis.
    """
    result = (weights * values).sum(dim=-1)
    if _checked_form(form) == "tchebycheff":
        if ideal is None:
            raise ConfigError("ideal=None; form='tchebycheff' needs the ideal point (M,)")
        result = rho * result - (weights * (ideal - values)).amax(dim=-1)
    possible = torch.isfinite(values).all(dim=-1)  # 0 · (-inf) is NaN above
    return torch.where(possible, result, torch.full_like(result, -math.inf))


def _checked_form(form: Any) -> str:
    if form not in SCALARISATION_FORMS:
        raise ConfigError(
            f"form={form!r}; expected one of {', '.join(SCALARISATION_FORMS)}.{nearest(form, SCALARISATION_FORMS)}"
        )
    return str(form)


class MultiObjective(ABC):
    """The scale of the objectives and the ideal point, which both scalarisations share.

    Args:
        num_objectives: M >= 2.
        form: ``"linear"`` or ``"tchebycheff"``.
        rho: augmentation of the latter, >= 0.
        bounds: M pairs (low, high) of raw rewards that become 0 and 1, or None for quantiles of a warm-up. Values
            beyond are not clipped.
        ideal: (M,), raw rewards, for ``"tchebycheff"``; it should exceed what can be reached. By default `PerObjective`
            lets it run, and `Directions` takes the upper bounds, or the best of the warm-up where that is more.
        warm_up: judged leaves that `fit` should be given; it is not used with ``bounds``.

    Raises:
        ConfigError: a value out of range.
    """

    def __init__(
        self,
        num_objectives: int,
        *,
        form: str,
        rho: float,
        bounds: Sequence[Sequence[float]] | Tensor | None,
        ideal: Sequence[float] | Tensor | None,
        warm_up: int,
    ) -> None:
        expected = "at least 2 objectives; for one use SingleObjective"
        self.num_objectives = checked_count("num_objectives", num_objectives, expected, 2)
        self.form = _checked_form(form)
        self.rho = checked_number("rho", rho, "a finite number, at least 0", lambda value: 0.0 <= value < math.inf)
        self.warm_up = checked_count("warm_up", warm_up, "at least 2 leaves", 2)
        self._bounds = None if bounds is None else _checked_bounds(bounds, self.num_objectives)
        self._ideal = None if ideal is None else _finite("ideal", ideal, (self.num_objectives,))
        self._fixed_ideal = ideal is not None

    @property
    def ready(self) -> bool:
        """Whether the scale is frozen; until then every column is 0 and `fit` is due after ``warm_up`` leaves."""
        return self._bounds is not None

    @property
    def bounds(self) -> Tensor | None:
        """The raw rewards that are scaled to 0 and 1, float64 (M, 2)."""
        return self._bounds

    @property
    def ideal(self) -> Tensor:
        """The ideal point in scaled units, float64 (M,): 1 where none is known yet."""
        if self._bounds is None or self._ideal is None:
            return torch.ones(self.num_objectives, dtype=torch.float64)
        return self._scaled(self._ideal)

    def scaled(self, rewards: Tensor) -> Tensor:
        """Raw rewards (B, M) in scaled units, float64; -inf in rows that are not finite, 0 before the scale is frozen.

        A row of -inf is a leaf of probability 0, so that no NaN reaches an ancestor.
        """
        raw = self._checked(rewards)
        values = torch.zeros_like(raw) if self._bounds is None else self._scaled(raw)
        judged = torch.isfinite(raw).all(dim=1, keepdim=True)
        return torch.where(judged, values, torch.full_like(values, -math.inf))

    def fit(self, rewards: Tensor) -> Self:
        """The same objectives with their scale frozen by the warm-up's raw rewards (n, M); rows not finite drop out.

        An objective whose two quantiles agree (a rare hit) takes its smallest and largest value, one that never
        varies the unit scale above its value.

        Raises:
            ConfigError: fewer than two finite rows, or a scale that is frozen already (all stored values depend on it).
        """
        if self._bounds is not None:
            raise ConfigError("the scale is frozen already; start from an object without bounds")
        rows = self._finite_rows(rewards)
        if len(rows) < 2:
            raise ConfigError(f"{len(rows)} judged leaves in the warm-up; expected at least 2: go on, or pass bounds=")
        best = rows.amax(dim=0)
        return self._with(_bounds=_quantile_bounds(rows), _ideal=best if self._ideal is None else self._ideal)

    def observe(self, rewards: Tensor) -> Self:
        """The same objectives after more leaves: raw rewards (n, M), any order, none of them twice or all of them."""
        return self

    def num_columns(self, num_objectives: int) -> int:
        """K, what a leaf of a reward with so many objectives stores.

        Raises:
            ConfigError: another number than the one this object was made for.
        """
        if num_objectives != self.num_objectives:
            raise ConfigError(
                f"the reward has {num_objectives} objectives, {type(self).__name__} was made for {self.num_objectives}"
            )
        return self._width()

    @abstractmethod
    def _width(self) -> int: ...

    @abstractmethod
    def columns(self, rewards: Tensor) -> Tensor:
        """What leaves with these raw rewards (B, M) store: float64 (B, K), -inf in rows that are not finite."""

    @abstractmethod
    def draw(self, keys: Keys) -> Tensor:
        """One parameter a simulation, (B, \\*): a function of the keys' key, step and sample (the simulation)."""

    @abstractmethod
    def score(self, columns: Tensor, parameter: Tensor) -> Tensor:
        """Values (n,) of nodes with these columns (n, K), for one parameter (\\*) or one a row (n, \\*)."""

    @abstractmethod
    def preferences(self, parameters: Tensor) -> Tensor:
        """The weights (B, M) that drawn parameters stand for: what an archive keeps."""

    def state_dict(self) -> dict[str, Tensor]:
        """The frozen scale (M, 2) and the raw ideal (M,), NaN where unknown."""
        size = self.num_objectives
        bounds, ideal = self._bounds, self._ideal
        return {
            "bounds": _unknown(size, 2) if bounds is None else bounds.clone(),
            "ideal": _unknown(size) if ideal is None else ideal.clone(),
        }

    def restored(self, state: Mapping[str, Any]) -> Self:
        """The same objectives with a saved state.

        Raises:
            ConfigError: entries that are missing or of another shape.
        """
        found: dict[str, Tensor | None] = {}
        for name, own in self.state_dict().items():
            value = _doubles(state[name]) if name in state else None
            if value is None or value.shape != own.shape:
                raise ConfigError(
                    f"state entry {name!r} is {'missing' if value is None else got(value)}; expected {tuple(own.shape)}"
                )
            found["_" + name] = None if bool(value.isnan().any()) else value.clone()
        return self._with(**found)

    def _with(self, **changes: Any) -> Self:
        changed = copy.copy(self)
        vars(changed).update(changes)
        return changed

    def _scaled(self, raw: Tensor) -> Tensor:
        if self._bounds is None:
            return raw
        low, high = self._bounds.unbind(dim=1)
        return (raw - low) / (high - low)

    def _checked(self, rewards: Tensor) -> Tensor:
        raw = _doubles(rewards)
        if raw.ndim != 2 or raw.shape[1] != self.num_objectives:
            raise ConfigError(f"rewards have {got(raw)}; expected (B, {self.num_objectives}), one column an objective")
        return raw

    def _finite_rows(self, rewards: Tensor) -> Tensor:
        raw = self._checked(rewards)
        return raw[torch.isfinite(raw).all(dim=1)]


class PerObjective(MultiObjective):
    """One soft value an objective; each simulation draws a preference.

    Args:
        num_objectives: M >= 2.
        weights: ``"dirichlet"`` (uniform on the simplex), ``"das_dennis"`` (the lattice), or preferences (P, M), not
            negative, which are normalised. Lattice and rows are gone through in shuffled rounds: in every round of as
            many simulations as there are rows each comes once.
        form, rho, bounds, ideal, warm_up: see `MultiObjective`. Without ``ideal`` it runs: the best of each objective
            among the leaves observed.
        num_directions: upper limit of the lattice's size, at least M.

    The value of a node is f_c(V): see the module's text for its bias.
    """

    def __init__(
        self,
        num_objectives: int,
        *,
        weights: str | Sequence[Sequence[float]] | Tensor = "dirichlet",
        form: str = "linear",
        rho: float = 0.05,
        bounds: Sequence[Sequence[float]] | Tensor | None = None,
        ideal: Sequence[float] | Tensor | None = None,
        warm_up: int = 64,
        num_directions: int = 16,
    ) -> None:
        super().__init__(num_objectives, form=form, rho=rho, bounds=bounds, ideal=ideal, warm_up=warm_up)
        self.lattice: Tensor | None = None
        if isinstance(weights, str):
            if weights not in ("dirichlet", "das_dennis"):
                raise ConfigError(
                    f"weights={weights!r}; expected 'dirichlet', 'das_dennis' or preferences (P, M)."
                    f"{nearest(weights, ('dirichlet', 'das_dennis'))}"
                )
            if weights == "das_dennis":
                self.lattice = _largest_lattice(self.num_objectives, num_directions)
        else:
            self.lattice = _preferences("weights", weights, self.num_objectives)

    def _width(self) -> int:
        return self.num_objectives

    def columns(self, rewards: Tensor) -> Tensor:
        return self.scaled(rewards)

    def draw(self, keys: Keys) -> Tensor:
        """Preferences, float64 (B, M)."""
        if self.lattice is not None:
            return self.lattice[_shuffled_rounds(keys, len(self.lattice))]
        drawn = keys.to("cpu").at(purpose="preference").exponential((self.num_objectives,))
        return drawn / drawn.sum(dim=1, keepdim=True)

    def score(self, columns: Tensor, parameter: Tensor) -> Tensor:
        return scalarise(
            torch.as_tensor(columns), torch.as_tensor(parameter), form=self.form, ideal=self.ideal, rho=self.rho
        )

    def preferences(self, parameters: Tensor) -> Tensor:
        return torch.as_tensor(parameters)

    def observe(self, rewards: Tensor) -> Self:
        rows = self._finite_rows(rewards)
        if self._fixed_ideal or not len(rows):
            return self
        best = rows.amax(dim=0)
        return self._with(_ideal=best if self._ideal is None else torch.maximum(self._ideal, best))


class Directions(MultiObjective):
    """Exact soft values for K fixed preferences; each simulation draws one of them.

    Args:
        num_objectives: M >= 2.
        directions: at most so many (at least M): the largest Das-Dennis lattice that fits, `num_columns` of them;
            or preferences (K, M), not negative, which are normalised.
        form, rho, bounds, ideal, warm_up: see `MultiObjective`.

    Simulations go through the directions in shuffled rounds, in each of which every direction comes once.
    """

    def __init__(
        self,
        num_objectives: int,
        directions: int | Sequence[Sequence[float]] | Tensor = 16,
        *,
        form: str = "linear",
        rho: float = 0.05,
        bounds: Sequence[Sequence[float]] | Tensor | None = None,
        ideal: Sequence[float] | Tensor | None = None,
        warm_up: int = 64,
    ) -> None:
        super().__init__(num_objectives, form=form, rho=rho, bounds=bounds, ideal=ideal, warm_up=warm_up)
        if isinstance(directions, int):
            self.directions = _largest_lattice(self.num_objectives, directions)
        else:
            self.directions = _preferences("directions", directions, self.num_objectives)

    @property
    def ideal(self) -> Tensor:
        """The ideal point in scaled units, float64 (M,): as given, else at least 1."""
        ideal = super().ideal
        return ideal if self._fixed_ideal else ideal.clamp_min(1.0)

    def _width(self) -> int:
        return len(self.directions)

    def columns(self, rewards: Tensor) -> Tensor:
        values = self.scaled(rewards).unsqueeze(1)
        if not self.ready:
            return values.sum(dim=2).expand(-1, len(self.directions)).clone()
        return scalarise(values, self.directions, form=self.form, ideal=self.ideal, rho=self.rho)

    def draw(self, keys: Keys) -> Tensor:
        """Indices of directions, int64 (B,)."""
        return _shuffled_rounds(keys, len(self.directions))

    def score(self, columns: Tensor, parameter: Tensor) -> Tensor:
        table, index = torch.as_tensor(columns), torch.as_tensor(parameter)
        return table.gather(1, index.expand(len(table)).unsqueeze(1)).squeeze(1)

    def preferences(self, parameters: Tensor) -> Tensor:
        return self.directions[torch.as_tensor(parameters)]


def _doubles(value: Any) -> Tensor:
    """float64 on the CPU; Python's numbers without a detour through float32."""
    return torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()


def _unknown(*shape: int) -> Tensor:
    return torch.full(shape, math.nan, dtype=torch.float64)


def _shuffled_rounds(keys: Keys, count: int) -> Tensor:
    """Row ``sample`` of an endless sequence of shuffled rounds over ``count`` entries, int64 (B,).

    Shuffled, since trees that take every G-th simulation would see only some of the entries of a fixed order.
    """
    keys = keys.to("cpu")
    rounds = replace(keys, sample=keys.sample // count).at(purpose="preference")
    order = rounds.uniform((count,)).argsort(dim=1)
    return order.gather(1, (keys.sample % count).unsqueeze(1)).squeeze(1)


def _largest_lattice(num_objectives: int, limit: Any) -> Tensor:
    expected = f"at least {num_objectives}, one direction an objective"
    count = checked_count("number of directions", limit, expected, num_objectives)
    divisions = 1
    while math.comb(divisions + num_objectives, num_objectives - 1) <= count:
        divisions += 1
    return das_dennis(num_objectives, divisions)


def _preferences(name: str, value: Any, size: int) -> Tensor:
    rows = _doubles(value)
    rows = _finite(name, rows, (len(rows) if rows.ndim else 0, size))
    if not len(rows) or bool((rows < 0).any()) or bool((rows.sum(dim=1) <= 0).any()):
        raise ConfigError(f"{name}={rows.tolist()}; expected rows of weights, none negative, each with a positive one")
    return rows / rows.sum(dim=1, keepdim=True)


def _finite(name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    tensor = _doubles(value)
    if tuple(tensor.shape) != shape or not bool(torch.isfinite(tensor).all()):
        raise ConfigError(f"{name}={tensor.tolist()}; expected finite numbers of shape {shape}")
    return tensor.clone()


def _checked_bounds(bounds: Any, size: int) -> Tensor:
    pairs = _finite("bounds", bounds, (size, 2))
    if bool((pairs[:, 0] >= pairs[:, 1]).any()):
        raise ConfigError(f"bounds={pairs.tolist()}; expected pairs (low, high) with low < high, one an objective")
    return pairs


def _quantile_bounds(rows: Tensor) -> Tensor:
    """5 % and 95 % quantiles (M, 2), or the range where they agree, or one unit where that is a point too."""
    low, high = torch.quantile(rows, torch.tensor(_QUANTILES, dtype=torch.float64), dim=0)
    smallest, largest = rows.amin(dim=0), rows.amax(dim=0)
    flat = low >= high
    low, high = torch.where(flat, smallest, low), torch.where(flat, largest, high)
    return torch.stack((low, torch.where(low >= high, low + 1.0, high)), dim=1)
