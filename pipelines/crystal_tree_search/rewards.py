"""Rewards of crystals: stability (of new formulas, or any), formation energy, density, scarcity, composition, symmetry.

All are :class:`genkit.rewards.Reward` on the dict of :mod:`.structures`; higher is better. What is not valid
(:mod:`.validity`) gets no value, and no energy is asked for it; the search then applies its floor. Several objectives
stack (:class:`genkit.rewards.StackedRewards`) or add up (:class:`genkit.rewards.WeightedSum`); :mod:`.reward_pool`
spreads any of them over processes and guards against those that raise or hang.

Logs hold counts (integers): ``invalid/<reason>``, ``energy/failed``, ``energy/exploded``, ``hull/unknown``, and so on.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from genkit._checks import checked_count, checked_number
from genkit.errors import ConfigError, nearest
from genkit.pipelines.crystal_tree_search.hull import Hull, as_hull, element_symbols
from genkit.pipelines.crystal_tree_search.potentials import ASECalculatorPotential, Potential, PotentialFailure
from genkit.pipelines.crystal_tree_search.structures import check_crystals, formula_keys, optional_module
from genkit.pipelines.crystal_tree_search.symmetry import (
    TOLERANCES,
    SymmetryBackend,
    crystal_system,
    space_group_ladder,
)
from genkit.pipelines.crystal_tree_search.validity import Validity, ValidityRules, check_validity
from genkit.rewards.base import Context, Reward, RewardOutput, Sample, context_entry, reward_output

__all__ = [
    "ASECalculatorReward",
    "CompositionReward",
    "CrystalReward",
    "DensityReward",
    "FormationEnergyReward",
    "NovelStabilityReward",
    "ScarcityReward",
    "SpaceGroupReward",
    "StabilityAssessment",
    "StabilityReward",
    "assess_stability",
    "densities",
]

Logs = dict[str, Tensor | float]

#: g / cm^3 in atomic mass units / Angstrom^3.
_DENSITY = 1.66053906892


class CrystalReward(Reward):
    """Checks the fields, applies the validity rules, and counts; a subclass judges what is left.

    Args:
        rules: of validity; None: the defaults.
    """

    differentiable = False

    def __init__(self, rules: ValidityRules | None = None) -> None:
        self.rules = rules or ValidityRules()

    @abstractmethod
    def judge(self, crystals: Mapping[str, Tensor], valid: Tensor, context: Context | None) -> tuple[Tensor, Logs]:
        """Values (B,) float64, NaN where they cannot be told, and counts. Rows outside ``valid`` (B,) are dropped."""

    def values(self, sample: Sample, context: Context | None) -> RewardOutput:
        """Values with their mask; see :class:`genkit.rewards.Reward`.

        Raises:
            ConfigError: the sample is no batch of crystals.
        """
        check_crystals(sample)
        crystals: Mapping[str, Tensor] = sample  # type: ignore[assignment]  # checked above
        validity = check_validity(crystals, self.rules)
        values, logs = self.judge(crystals, validity.mask, context)
        refused: Logs = {f"invalid/{reason}": count for reason, count in validity.counts.items() if count}
        return reward_output(values.to(validity.mask.device), validity.mask, {**refused, **logs})


# --- energies ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StabilityAssessment:
    """Everything that an energy and a hull say about B crystals.

    Args:
        energy: (B,) float64, eV per atom; NaN where invalid or failed.
        above_hull: (B,) float64, eV per atom; NaN also where the hull is unknown.
        validity: of the crystals themselves.
        exploded: (B,) bool, energies beyond the rules' ``max_energy``.
        unknown: (B,) bool, an energy, but no hull.
        failures: of the potential.
    """

    energy: Tensor
    above_hull: Tensor
    validity: Validity
    exploded: Tensor
    unknown: Tensor
    failures: tuple[PotentialFailure, ...]

    @property
    def counts(self) -> dict[str, int]:
        """``energy/failed``, ``energy/exploded``, ``hull/unknown``."""
        return {
            "energy/failed": len(self.failures),
            "energy/exploded": int(self.exploded.sum()),
            "hull/unknown": int(self.unknown.sum()),
        }


def assess_stability(
    crystals: Mapping[str, Tensor], potential: Potential, hull: Hull, rules: ValidityRules | None = None
) -> StabilityAssessment:
    """Validity, then energies of the valid, then their distances from the hull.

    Args:
        crystals: B of them.
        potential: whose energies made the hull, too.
        hull: of the entries to compare with.
        rules: of validity; None: the defaults.

    Raises:
        ConfigError: fields of another shape, or a hull that is known to be of another potential.
    """
    hull.check_potential(potential)
    rules = rules or ValidityRules()
    validity = check_validity(crystals, rules)
    output = potential.energies(crystals, validity.mask.cpu())
    exploded = output.valid & (output.energy.abs() >= rules.max_energy)
    energy = torch.where(exploded, torch.full_like(output.energy, torch.nan), output.energy)
    distances = hull.energy_above_hull(crystals, energy)
    unknown = torch.isfinite(energy) & ~distances.known
    return StabilityAssessment(energy, distances.values, validity, exploded, unknown, output.failures)


class StabilityReward(CrystalReward):
    """-E_hull, clipped: eV per atom above the convex hull, with the sign of a reward.

    Single-point energies: a search on them pays for a few atoms off their places, so what it finds is relaxed and
    judged again (:mod:`.relaxation`, :mod:`.crystal_metrics`).

    Args:
        potential: of the energies.
        hull: a :class:`.hull.Hull` made of the same potential's energies, or what :func:`.hull.as_hull` accepts.
        clip: E_hull is held within these, eV per atom. Below the lower bound nothing is gained: energies far below
            the hull are errors of a potential more often than discoveries.
        rules: of validity; None: the defaults.

    Raises:
        ConfigError: bounds out of order, no potential or hull, or a hull that is known to be of another potential.
    """

    def __init__(
        self,
        potential: Potential,
        hull: Any,
        clip: tuple[float, float] = (-0.1, 1.0),
        *,
        rules: ValidityRules | None = None,
    ) -> None:
        super().__init__(rules)
        if not isinstance(potential, Potential):
            raise ConfigError(
                f"potential={type(potential).__name__}; expected one of .potentials (ASECalculatorPotential wraps any "
                "ASE calculator)"
            )
        if len(clip) != 2 or not clip[0] < clip[1]:
            raise ConfigError(f"clip={clip!r}; expected (low, high) in eV per atom, low < high")
        self.potential, self.hull, self.clip = potential, as_hull(hull), (float(clip[0]), float(clip[1]))
        self.hull.check_potential(potential)

    def judge(self, crystals: Mapping[str, Tensor], valid: Tensor, context: Context | None) -> tuple[Tensor, Logs]:
        """See :class:`CrystalReward`."""
        found = self.assess(crystals)
        return -found.above_hull.clamp(*self.clip), dict(found.counts)

    def prepare(self) -> None:
        """Loads what the potential loads on first use, so that the first batch takes no longer than the others."""
        prepare = getattr(self.potential, "prepare", None)
        if prepare is not None:
            prepare()

    def assess(self, crystals: Mapping[str, Tensor]) -> StabilityAssessment:
        """The unclipped numbers behind the values."""
        return assess_stability(crystals, self.potential, self.hull, self.rules)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.potential!r}, {self.hull!r})"


class FormationEnergyReward(StabilityReward):
    """-(formation energy), clipped: eV per atom against the elements alone, without competing compounds.

    Args:
        potential: of the energies.
        hull: what holds the elements' energies; its compounds are left out.
        clip: the formation energy is held within these, eV per atom.
        rules: of validity; None: the defaults.
    """

    def __init__(
        self,
        potential: Potential,
        hull: Any,
        clip: tuple[float, float] = (-5.0, 1.0),
        *,
        rules: ValidityRules | None = None,
    ) -> None:
        super().__init__(potential, hull, clip, rules=rules)
        self.hull = self.hull.elemental()


class NovelStabilityReward(StabilityReward):
    """`StabilityReward`, less a penalty where the reduced formula is known already.

    A search for stability alone finds what the base was trained on, and rightly so: those crystals are stable. This one
    pays for stable crystals of new formulas. A new structure of a known formula pays the penalty too.

    Args:
        potential, hull, clip, rules: as in :class:`StabilityReward`.
        known: crystals whose formulas are known.
        penalty: eV per atom.

    Raises:
        ConfigError: as for :class:`StabilityReward`, or a negative penalty.
    """

    def __init__(
        self,
        potential: Potential,
        hull: Any,
        known: Mapping[str, Tensor],
        penalty: float = 0.4,
        clip: tuple[float, float] = (-0.1, 1.0),
        *,
        rules: ValidityRules | None = None,
    ) -> None:
        super().__init__(potential, hull, clip, rules=rules)
        check_crystals(known)
        self.known = frozenset(formula_keys(known))
        self.penalty = checked_number("penalty", penalty, "eV per atom, at least 0", lambda value: value >= 0)

    def judge(self, crystals: Mapping[str, Tensor], valid: Tensor, context: Context | None) -> tuple[Tensor, Logs]:
        """See :class:`CrystalReward`."""
        values, logs = super().judge(crystals, valid, context)
        known = torch.tensor([key in self.known for key in formula_keys(crystals)], device=values.device)
        logs["formula/known"] = int((known & valid.to(known.device)).sum())
        return values - self.penalty * known.to(values.dtype), logs

    def __repr__(self) -> str:
        return f"NovelStabilityReward({self.potential!r}, {self.hull!r}, {len(self.known)} formulas, {self.penalty})"


class ASECalculatorReward(StabilityReward):
    """`StabilityReward` of any ASE calculator: a universal potential, a classical one, or a wrapper of a DFT code.

    Args:
        calculator: an ASE calculator, or a function that makes one (needed where processes share the work).
        hull: of the calculator's own energies; see :func:`.hull.as_hull`.
        clip, rules: as in :class:`StabilityReward`.

    Raises:
        ConfigError: as for :class:`StabilityReward`.
    """

    def __init__(
        self,
        calculator: Any,
        hull: Any,
        clip: tuple[float, float] = (-0.1, 1.0),
        *,
        rules: ValidityRules | None = None,
    ) -> None:
        super().__init__(ASECalculatorPotential(calculator), hull, clip, rules=rules)


# --- what needs no energy ---------------------------------------------------------------------------------------------


def _atomic_masses() -> Tensor:
    """(119,) atomic mass units by atomic number; NaN where pymatgen knows none."""
    core = optional_module("pymatgen.core")
    masses = [math.nan] + [float(core.Element.from_Z(number).atomic_mass) for number in range(1, 119)]
    return torch.tensor(masses, dtype=torch.float64)


def densities(crystals: Mapping[str, Tensor], masses: Tensor | None = None) -> Tensor:
    """(B,) float64 densities in g/cm^3.

    Args:
        crystals: B of them.
        masses: (119,) by atomic number; None: pymatgen's.
    """
    check_crystals(crystals)
    masses = _atomic_masses() if masses is None else masses
    weight = masses.to(crystals["numbers"].device)[crystals["numbers"].clamp(0, 118)]
    total = torch.where(crystals["mask"].bool(), weight, torch.zeros_like(weight)).sum(1)
    return _DENSITY * total / torch.linalg.det(crystals["lattice"].double()).abs()


class DensityReward(CrystalReward):
    """Density in g/cm^3: as high as possible, or near a target.

    Args:
        target: values are -|density - target| / scale; None: density / scale.
        scale: g/cm^3.
        rules: of validity, without which a cell of no volume would win; None: the defaults.

    Raises:
        ConfigError: a target or a scale that is not positive.
    """

    def __init__(self, target: float | None = None, *, scale: float = 1.0, rules: ValidityRules | None = None) -> None:
        super().__init__(rules)
        accepts = lambda value: 0 < value < math.inf  # noqa: E731
        expected = "a positive number of g/cm^3"
        self.target = None if target is None else checked_number("target", target, expected, accepts)
        self.scale = checked_number("scale", scale, expected, accepts)
        self._masses: Tensor | None = None

    def judge(self, crystals: Mapping[str, Tensor], valid: Tensor, context: Context | None) -> tuple[Tensor, Logs]:
        """See :class:`CrystalReward`."""
        if self._masses is None:
            self._masses = _atomic_masses()
        found = densities(crystals, self._masses)
        return (found if self.target is None else -(found - self.target).abs()) / self.scale, {}

    def __repr__(self) -> str:
        return f"DensityReward({'highest' if self.target is None else self.target})"


class ScarcityReward(CrystalReward):
    """How little the elements depend on few suppliers: -HHI / 10,000, in [-1, 0].

    HHI is the Herfindahl-Hirschman index of the elements, averaged by their shares of the mass: Gaultois et al.,
    "Data-Driven Review of Thermoelectric Materials", Chemistry of Materials 25 (2013) 2911, as pymatgen ships it
    (``pymatgen.analysis.hhi``). Crystals with an element that the table does not have (hydrogen, technetium, the
    actinides) are not judged, and counted as ``scarcity/unknown``.

    Args:
        kind: ``"reserve"``, of known reserves, or ``"production"``, of today's mines.
        rules: of validity; None: the defaults.

    Raises:
        ConfigError: an unknown kind.
    """

    _KINDS = ("reserve", "production")

    def __init__(
        self, kind: Literal["reserve", "production"] = "reserve", *, rules: ValidityRules | None = None
    ) -> None:
        super().__init__(rules)
        if kind not in self._KINDS:
            raise ConfigError(f"kind={kind!r}; expected 'reserve' or 'production'.{nearest(kind, self._KINDS)}")
        self.kind = kind
        self._tables: tuple[Tensor, Tensor] | None = None

    def judge(self, crystals: Mapping[str, Tensor], valid: Tensor, context: Context | None) -> tuple[Tensor, Logs]:
        """See :class:`CrystalReward`."""
        if self._tables is None:
            self._tables = _atomic_masses(), _hhi_table(self.kind)
        mask, numbers = crystals["mask"].bool(), crystals["numbers"].clamp(0, 118)
        masses, index = (table.to(numbers.device)[numbers] for table in self._tables)
        zero = torch.zeros_like(masses)
        total = torch.where(mask, masses, zero).sum(1)
        values = -(torch.where(mask, masses * index, zero).sum(1) / total) / 1e4
        return values, {"scarcity/unknown": int((valid & ~torch.isfinite(values)).sum())}

    def __repr__(self) -> str:
        return f"ScarcityReward({self.kind})"


def _hhi_table(kind: str) -> Tensor:
    """(119,) indices by atomic number, NaN where there is none."""
    model = optional_module("pymatgen.analysis.hhi").HHIModel()
    column = 0 if kind == "production" else 1
    symbols = element_symbols()
    known = {symbol: pair[column] for symbol, pair in model.symbol_hhip_hhir.items()}
    return torch.tensor([known.get(symbol, math.nan) for symbol in symbols], dtype=torch.float64)


class CompositionReward(CrystalReward):
    """Share of the wanted elements that a crystal holds, minus the share of its atoms that are forbidden: in [-1, 1].

    Args:
        wanted: symbols or atomic numbers.
        forbidden: symbols or atomic numbers.
        rules: of validity; None: the defaults.

    Raises:
        ConfigError: no element, an unknown one, or one that is both.
    """

    def __init__(
        self,
        wanted: Iterable[str | int] = (),
        forbidden: Iterable[str | int] = (),
        *,
        rules: ValidityRules | None = None,
    ) -> None:
        super().__init__(rules)
        self.wanted, self.forbidden = _numbers("wanted", wanted), _numbers("forbidden", forbidden)
        if not self.wanted + self.forbidden or set(self.wanted) & set(self.forbidden):
            raise ConfigError(f"wanted={self.wanted}, forbidden={self.forbidden}; expected some elements, none in both")

    def judge(self, crystals: Mapping[str, Tensor], valid: Tensor, context: Context | None) -> tuple[Tensor, Logs]:
        """See :class:`CrystalReward`."""
        numbers, mask = crystals["numbers"], crystals["mask"].bool()
        values = torch.zeros(len(numbers), dtype=torch.float64, device=numbers.device)
        for number in self.wanted:
            values += ((numbers == number) & mask).any(1).double() / len(self.wanted)
        unwanted = torch.isin(numbers, numbers.new_tensor(self.forbidden)) & mask
        return values - unwanted.sum(1) / mask.sum(1).clamp_min(1), {}

    def __repr__(self) -> str:
        return f"CompositionReward(wanted={self.wanted}, forbidden={self.forbidden})"


def _numbers(name: str, elements: Iterable[str | int]) -> list[int]:
    symbols = element_symbols()
    found = []
    for element in [elements] if isinstance(elements, str) else elements:
        number = symbols.index(element) if element in symbols[1:] else element
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < len(symbols):
            raise ConfigError(
                f"{name}: {element!r} is no element; expected a symbol or an atomic number."
                f"{nearest(str(element).capitalize(), symbols[1:])}"
            )
        found.append(number)
    return found


class SpaceGroupReward(CrystalReward):
    """Share of the tolerance ladder at which a crystal has the wanted space group, plus a bonus for its system.

    Graded, so that a search has something to follow before it hits: a crystal that has the group at 0.3 and 0.1 A, but
    not tighter, is worth 0.5, plus ``bonus`` for the right crystal system at 0.1 A.

    Args:
        target: 1 to 230; None: from ``context["space_group"]``, one a crystal.
        tolerances: the ladder, Angstrom.
        bonus: for the crystal system at ``bonus_tolerance``, which the ladder need not hold.
        bonus_tolerance: Angstrom.
        backend: what finds the groups; see :func:`.symmetry.space_group_ladder`.
        rules: of validity; None: the defaults.

    Raises:
        ConfigError: no such space group or backend.
    """

    def __init__(
        self,
        target: int | None,
        *,
        tolerances: Sequence[float] = TOLERANCES,
        bonus: float = 0.25,
        bonus_tolerance: float = 0.1,
        backend: SymmetryBackend = "moyopy",
        rules: ValidityRules | None = None,
    ) -> None:
        super().__init__(rules)
        expected = "a space group number, 1 to 230"
        self.target = None if target is None else checked_count("target", target, expected)
        if self.target is not None and self.target > 230:
            raise ConfigError(f"target={target}; expected {expected}")
        if backend not in get_args(SymmetryBackend):
            raise ConfigError(f"backend={backend!r}; expected moyopy or spglib.")
        self.tolerances = tuple(dict.fromkeys(float(one) for one in tolerances))
        self.bonus, self.bonus_tolerance = float(bonus), float(bonus_tolerance)
        self.backend: SymmetryBackend = backend

    def judge(self, crystals: Mapping[str, Tensor], valid: Tensor, context: Context | None) -> tuple[Tensor, Logs]:
        """See :class:`CrystalReward`."""
        size = len(crystals["numbers"])
        wanted = torch.full((size,), self.target or 0, dtype=torch.int64)
        if self.target is None:
            wanted = context_entry(context, "space_group", size, of=self).long().cpu()
        steps = dict.fromkeys((*self.tolerances, self.bonus_tolerance))
        ladder = space_group_ladder(crystals, tuple(steps), backend=self.backend, select=valid)
        hits = ladder.numbers[:, : len(self.tolerances)] == wanted.unsqueeze(1)
        system = crystal_system(ladder.at(self.bonus_tolerance)) == crystal_system(wanted)
        values = hits.double().mean(1) + self.bonus * system.double()
        return values.masked_fill(wanted < 1, torch.nan), {}

    def __repr__(self) -> str:
        return f"SpaceGroupReward({self.target})"
