"""Crystals as the state of a chain, and back: lattice, fractional coordinates, atom types, mask.

*Physical crystals* are what rewards judge: ``lattice`` float32 (B, 3, 3) with the lattice vectors in Å as rows, in the
orientation in which the matrix is symmetric and positive definite; ``coordinates`` float32 (B, N, 3), fractional, in
[0, 1); ``numbers`` int64 (B, N), atomic numbers; ``mask`` bool (B, N), True for the first n entries. Padding is 0.

The *state* is what a scheduler walks, with S the symmetric lattice, n the number of atoms, K elements and, for the
family ``"matter"`` (MatterGen's fields) or ``"diffcsp"`` (DiffCSP's)::

    lattice      float32 (B, 6)      matter:  (S − μ_n I) / (s n^{1/3}),  μ_n = (n/ρ)^{1/3}
                                     diffcsp: (log S − log μ_n I) / s;   entries xx, yy, zz, yz, xz, xy
    coordinates  float32 (B, N, 3)
    types        matter:  int64 (B, N), indices into the elements, K the mask (and the padding)
                 diffcsp: float32 (B, N, K), one-hot times ``type_scale``
    mask         bool (B, N)

Unit noise on the six numbers is the symmetric noise with ε_ii on the diagonal and (ε_ij + ε_ji)/√2 off it.

Differs from the paper in: everything here; only the paper's abstract is public. The fields follow Zeni et al.,
"MatterGen", arXiv 2312.03687, and Jiao et al., "DiffCSP", arXiv 2309.04475, with continuous time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import Tensor

from genkit._checks import check_same_shape, checked_count, checked_number, got
from genkit.errors import ConfigError, nearest
from genkit.pipelines.crystal_tree_search.hull import element_symbols
from genkit.samplers.noise import Keys
from genkit.schedulers.masked import MaskedBlockScheduler
from genkit.schedulers.product import ProductScheduler
from genkit.schedulers.vp import VPScheduler
from genkit.schedulers.wrapped import WrappedScheduler

__all__ = [
    "CrystalCodec",
    "Family",
    "LatticeCode",
    "fit_codec",
    "symmetric_entries",
    "symmetric_matrix",
]

Family = Literal["matter", "diffcsp"]
State = dict[str, Tensor]
Stage = Callable[[Keys, Any, Any], State]

_ROWS, _COLUMNS = (0, 1, 2, 1, 0, 0), (0, 1, 2, 2, 2, 1)
_SYMBOLS = element_symbols()[1:]


# ---- lattices --------------------------------------------------------------------------------------------------------


def symmetric_entries(matrix: Tensor) -> Tensor:
    """The entries xx, yy, zz, yz, xz, xy of symmetric matrices: (B, 3, 3) → (B, 6)."""
    return matrix[..., _ROWS, _COLUMNS]


def symmetric_matrix(entries: Tensor) -> Tensor:
    """(B, 6) → (B, 3, 3), the inverse of :func:`symmetric_entries`."""
    xx, yy, zz, yz, xz, xy = entries.unbind(-1)
    return torch.stack((xx, xy, xz, xy, yy, yz, xz, yz, zz), dim=-1).unflatten(-1, (3, 3))


def _of_eigenvalues(matrix: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """V f(w) Vᵀ in float64; NaN where the matrix is not finite (eigh would raise)."""
    finite = torch.isfinite(matrix).all(dim=-1).all(dim=-1)[..., None, None]
    values, vectors = torch.linalg.eigh(torch.where(finite, matrix, 0.0).to(torch.float64))
    result = (vectors * change(values).unsqueeze(-2)) @ vectors.mT
    return torch.where(finite, 0.5 * (result + result.mT), math.nan)


@dataclass(frozen=True)
class LatticeCode:
    """The change of variables between symmetric lattices in Å and the six numbers of the state.

    Args:
        density: ρ, atoms per Å³.
        std: s, the spread of the data around the cube μ_n: in Å for one atom (matter), or of the logarithm (diffcsp).
        family: ``"matter"`` or ``"diffcsp"``.
    """

    density: float
    std: float
    family: str = "matter"

    def cube(self, num_atoms: Tensor) -> Tensor:
        """μ_n = (n/ρ)^{1/3} in Å: the edge of a cube that holds n atoms, (B,)."""
        return (num_atoms.to(torch.float32) / self.density).pow(1.0 / 3.0)

    def encode(self, lattice: Tensor, num_atoms: Tensor) -> Tensor:
        """(B, 3, 3) symmetric in Å, (B,) → (B, 6)."""
        return self._entries(lattice, num_atoms) / self._width(num_atoms)

    def _entries(self, lattice: Tensor, num_atoms: Tensor) -> Tensor:
        """The entries around the cube, before they are scaled."""
        cube = self.cube(num_atoms)
        if self.family == "diffcsp":
            lattice = _of_eigenvalues(lattice, lambda w: w.clamp(min=1e-12).log()).to(torch.float32)
            cube = cube.log()
        return symmetric_entries(lattice) - cube.unsqueeze(-1) * cube.new_tensor((1, 1, 1, 0, 0, 0))

    def _width(self, num_atoms: Tensor) -> Tensor:
        power = 1.0 / 3.0 if self.family == "matter" else 0.0
        return self.std * num_atoms.to(torch.float32).pow(power).unsqueeze(-1)

    def decode(self, entries: Tensor, num_atoms: Tensor) -> Tensor:
        """(B, 6), (B,) → (B, 3, 3) symmetric in Å, float32; positive definite for ``"diffcsp"`` alone."""
        cube = self.cube(num_atoms)
        matrix = symmetric_matrix(entries.to(torch.float32) * self._width(num_atoms))
        identity = torch.eye(3, device=entries.device)
        if self.family == "matter":
            return matrix + cube[:, None, None] * identity
        exponential = _of_eigenvalues(matrix, lambda w: w.clamp(max=20.0).exp()).to(torch.float32)
        return cube[:, None, None] * exponential


# ---- the codec -------------------------------------------------------------------------------------------------------


class CrystalCodec(ConfigMixin):
    """Physical crystals ↔ the chain's state, the chain's scheduler, and its prior. See the module's docstring.

    Args:
        elements: the K atomic numbers that occur, increasing.
        density: ρ, atoms per Å³.
        lattice_std: s, see :class:`LatticeCode`.
        family: ``"matter"`` (masked types) or ``"diffcsp"`` (noisy one-hot types, logarithm of the lattice).
        type_scale: length of a one-hot type (``"diffcsp"``).
        max_atoms: N, entries a crystal is padded to.
        num_atoms: probabilities (or counts) of n = 1 … N; None: all equal.
        num_atoms_by_group: space group (as text) → counts of n = 1 … N among its crystals, which a guided proposal
            draws n from.
        sigma_min, sigma_max: widths of the coordinates' noise, in fractional units.
        schedule: noise levels of the Gaussian fields, of :class:`~genkit.schedulers.VPScheduler`.
        time_powers: field → p, its own time being t^p: above 1 it is decided before the others
            (:class:`~genkit.schedulers.ProductScheduler`).

    Raises:
        ConfigError: an option of another type or range.
    """

    config_name = "codec_config.json"

    @register_to_config
    def __init__(
        self,
        elements: Sequence[int],
        density: float,
        lattice_std: float,
        family: str = "matter",
        type_scale: float = 2.0,
        max_atoms: int = 8,
        num_atoms: Sequence[float] | None = None,
        sigma_min: float = 0.005,
        sigma_max: float = 0.5,
        schedule: str = "cosine",
        time_powers: Mapping[str, float] | None = None,
        num_atoms_by_group: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        self.elements = _checked_elements(elements)
        self.family = _checked_family(family)
        density = checked_number("density", density, "atoms per cubic Å, above 0", lambda v: 0.0 < v < math.inf)
        std = checked_number("lattice_std", lattice_std, "a number above 0", lambda v: 0.0 < v < math.inf)
        self.lattice_code = LatticeCode(density, std, family)
        self.type_scale = checked_number("type_scale", type_scale, "a number above 0", lambda v: 0.0 < v < math.inf)
        self.max_atoms = checked_count("max_atoms", max_atoms)
        self.num_atoms = _checked_probabilities(num_atoms, self.max_atoms)
        self.num_atoms_by_group = {
            int(group): _checked_probabilities(counts, self.max_atoms)
            for group, counts in (num_atoms_by_group or {}).items()
        }
        self._levels = {"sigma_min": sigma_min, "sigma_max": sigma_max}
        self._schedule, self._powers = schedule, dict(time_powers or {})
        self.scheduler()  # refuses its options now
        self._index = torch.full((max(self.elements) + 1,), -1, dtype=torch.int64)
        self._index[list(self.elements)] = torch.arange(len(self.elements))

    def register_to_config(self, **kwargs: Any) -> None:
        """Keeps every option: diffusers takes those given by position for defaults and would drop them at loading."""
        kwargs.pop("_use_default_values", None)
        super().register_to_config(**kwargs)

    @property
    def mask_id(self) -> int:
        """K, the class of masked (and padded) types."""
        return len(self.elements)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one sample's noisy fields."""
        n, k = self.max_atoms, len(self.elements)
        types = (n,) if self.family == "matter" else (n, k)
        return {"lattice": (6,), "coordinates": (n, 3), "types": types}

    def scheduler(self, fixed_types: bool = False) -> ProductScheduler:
        """The chain's scheduler; with ``fixed_types`` the types are passed through unchanged."""
        fields: dict[str, Any] = {
            "lattice": VPScheduler(schedule=self._schedule),
            "coordinates": WrappedScheduler(**self._levels),
        }
        if not fixed_types:
            masked = MaskedBlockScheduler(mask_token_id=self.mask_id)
            fields["types"] = masked if self.family == "matter" else VPScheduler(schedule=self._schedule)
        masks = {name: "mask" for name in fields if name != "lattice"}
        powers = {name: p for name, p in self._powers.items() if name in fields or not fixed_types}
        return ProductScheduler(fields, masks=masks, powers=powers)

    # ---- crystals ↔ states --------------------------------------------------------------------------------------

    def encode(self, crystals: Mapping[str, Tensor]) -> State:
        """Physical crystals → clean states.

        Raises:
            ConfigError: missing fields, more atoms than ``max_atoms``, unknown elements, lattices that are not
                symmetric.
        """
        lattice, coordinates, numbers, mask = (_field(crystals, n) for n in _PHYSICAL)
        check_same_shape("mask", mask, "numbers", numbers)
        if coordinates.shape != (*numbers.shape, 3) or lattice.shape != (len(numbers), 3, 3):
            raise ConfigError(
                f"lattice has {got(lattice)}, coordinates {got(coordinates)}, numbers {got(numbers)}; expected "
                "(B, 3, 3), (B, N, 3) and (B, N)"
            )
        _refuse_rotated(lattice)
        mask, numbers, coordinates = (self._padded(x) for x in (mask, numbers, coordinates))
        index = self._indices(numbers, mask)
        return {
            "lattice": self.lattice_code.encode(lattice.to(torch.float32), mask.sum(dim=1)),
            "coordinates": _zero_padding(torch.remainder(coordinates.to(torch.float32), 1.0), mask),
            "types": index if self.family == "matter" else self._one_hot(index),
            "mask": mask,
        }

    def decode(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """States → physical crystals; a type that is still masked has the number 0."""
        mask, types = _field(state, "mask"), _field(state, "types")
        if self.family == "diffcsp":
            types = types.argmax(dim=-1)
        table = torch.tensor((*self.elements, 0), device=types.device)
        coordinates = torch.remainder(_field(state, "coordinates").to(torch.float32), 1.0)
        return {
            "lattice": self.lattice_code.decode(_field(state, "lattice"), mask.sum(dim=1)),
            "coordinates": _zero_padding(torch.where(coordinates < 1.0, coordinates, 0.0), mask),
            "numbers": torch.where(mask, table[types], 0),
            "mask": mask,
        }

    def _padded(self, x: Tensor) -> Tensor:
        """Filled up with zeros to N entries, or cut where the rest is padding."""
        extra = self.max_atoms - x.shape[1]
        if extra >= 0:
            return torch.cat((x, x.new_zeros(len(x), extra, *x.shape[2:])), dim=1)
        if x.dtype == torch.bool and bool(x[:, self.max_atoms :].any()):
            raise ConfigError(f"crystals of up to {int(x.sum(1).max())} atoms; expected at most {self.max_atoms}")
        return x[:, : self.max_atoms]

    def _indices(self, numbers: Tensor, mask: Tensor) -> Tensor:
        """Atomic numbers → indices into the elements, K at padding, int64 (B, N)."""
        table = self._index.to(numbers.device)
        known = (numbers >= 0) & (numbers < len(table))
        index = table[torch.where(known, numbers, 0)].masked_fill(~known, -1)
        if bool(((index < 0) & mask).any()):
            unknown = sorted(set(numbers[(index < 0) & mask].tolist()))
            raise ConfigError(f"atomic numbers {unknown} are not among the elements {list(self.elements)}")
        return torch.where(mask, index, self.mask_id)

    def _one_hot(self, index: Tensor) -> Tensor:
        """Indices → (B, N, K) one-hot times ``type_scale``, 0 at padding."""
        one_hot = torch.nn.functional.one_hot(index, self.mask_id + 1)[..., :-1]
        return self.type_scale * one_hot.to(torch.float32)

    # ---- the prior ----------------------------------------------------------------------------------------------

    def empty_state(self, mask: Tensor) -> State:
        """A state with these atoms (bool (B, N)) and nothing else drawn yet: zeros, and types masked."""
        zeros = {name: torch.zeros(len(mask), *shape, device=mask.device) for name, shape in self.shapes.items()}
        if self.family == "matter":
            zeros["types"] = torch.full(mask.shape, self.mask_id, dtype=torch.int64, device=mask.device)
        return {**zeros, "mask": mask}

    def stages(
        self,
        formula: Mapping[str | int, int] | None = None,
        space_group: int | None = None,
        base_probability: float = 0.0,
    ) -> list[Stage]:
        """The prior as levels of a tree: the number of atoms, then noise; with a ``formula`` the noise alone.

        Args:
            formula: fixes the composition.
            space_group: n is drawn from its law among the crystals of that group, and weighed back.
            base_probability: π₀, the share of n that is drawn from the prior's own law, so that weights are at most
                1/π₀.
        """
        if formula is None:
            law, given = self.num_atoms, self.num_atoms_by_group.get(space_group or 0)
            if given is not None:
                pairs = zip(self.num_atoms, given, strict=True)
                law = tuple(base_probability * p + (1.0 - base_probability) * q for p, q in pairs)
            return [NumAtomsStage(self, law), self.draw_noise]
        types, mask = self.composition(formula)
        return [lambda keys, state, context: self._noise(keys, types, mask, context)]

    def draw_noise(self, keys: Keys, state: State, context: Mapping[str, Tensor] | None = None) -> State:
        """Stage 2: pure noise for the atoms of ``state``."""
        noise = self.scheduler().prior(keys, self.shapes, context)
        return {**state, **noise}

    def _noise(self, keys: Keys, types: Tensor, mask: Tensor, context: Any) -> State:
        """Pure noise around a fixed composition."""
        state = self.empty_state(mask.expand(len(keys), -1).to(keys.key.device))
        shapes = {name: shape for name, shape in self.shapes.items() if name != "types"}
        noise = self.scheduler(fixed_types=True).prior(keys, shapes, context)
        fixed = types.expand(len(keys), *types.shape[1:]).to(keys.key.device)
        return {**state, **noise, "types": fixed}

    def prior(
        self,
        keys: Keys,
        formula: Mapping[str | int, int] | None = None,
        context: Mapping[str, Tensor] | None = None,
    ) -> State:
        """A state of pure noise, all stages at once; the context's ``num_atoms`` (B,) fixes the numbers of atoms."""
        state: Any = None
        for depth, stage in enumerate(self.stages(formula), start=1):
            state = stage(keys.at(step=depth, purpose=f"stage {depth}"), state, context)
        return state

    def composition(self, formula: Mapping[str | int, int]) -> tuple[Tensor, Tensor]:
        """Clean types (1, N) or (1, N, K), and the mask (1, N), of one cell with these atoms.

        Args:
            formula: symbol or atomic number → how many atoms, such as ``{"Na": 1, "Cl": 1}``.

        Raises:
            ConfigError: no atoms or too many, or elements that the codec does not know.
        """
        if not isinstance(formula, Mapping) or not formula:
            raise ConfigError(f"formula={formula!r}; expected symbols and counts, such as {{'Na': 1, 'Cl': 1}}")
        counts = {_atomic_number(key): checked_count(f"formula[{key!r}]", n) for key, n in formula.items()}
        numbers = [number for number, count in sorted(counts.items()) for _ in range(count)]
        if len(numbers) > self.max_atoms:
            raise ConfigError(f"formula={dict(formula)} has {len(numbers)} atoms; expected at most {self.max_atoms}")
        given = self._padded(torch.tensor([numbers]))
        index = self._indices(given, given > 0)
        return (index if self.family == "matter" else self._one_hot(index)), given > 0


@dataclass(frozen=True)
class NumAtomsStage:
    """The prior's first stage: n from a law of 1 … N, or the context's ``num_atoms`` (B,); all else is still empty.

    Args:
        codec: whose prior it is.
        law: probabilities of n = 1 … N that n is drawn from.
    """

    codec: CrystalCodec
    law: tuple[float, ...]

    def __call__(self, keys: Keys, state: Any = None, context: Mapping[str, Tensor] | None = None) -> State:
        """States with nothing but their masks drawn."""
        if context is not None and "num_atoms" in context:
            count = context["num_atoms"].to(keys.key.device)
        else:
            cumulative = torch.tensor(self.law, dtype=torch.float64, device=keys.key.device).cumsum(0)
            count = 1 + (cumulative[:-1] <= keys.uniform((1,)) * cumulative[-1]).sum(dim=1)
        return self.codec.empty_state(torch.arange(self.codec.max_atoms, device=count.device) < count.unsqueeze(-1))

    def log_weight(self, state: State, context: Mapping[str, Tensor] | None = None) -> Tensor:
        """log of the prior's probability of n over the law's, float64 (B,); 0 where the context gave n."""
        count = state["mask"].sum(dim=1)
        if context is not None and "num_atoms" in context:
            return torch.zeros(len(count), dtype=torch.float64, device=count.device)
        laws = (self.codec.num_atoms, self.law)
        prior, law = (torch.tensor(p, dtype=torch.float64, device=count.device)[count - 1] for p in laws)
        return (prior / law).log()


def fit_codec(
    crystals: Mapping[str, Tensor],
    family: Family = "matter",
    *,
    elements: Sequence[int] | None = None,
    max_atoms: int | None = None,
    sigma_min: float = 0.005,
    sigma_max: float = 0.5,
    type_scale: float = 2.0,
    time_powers: Mapping[str, float] | None = None,
) -> CrystalCodec:
    """The codec of a data set of physical crystals: its elements, density, spread of lattices and numbers of atoms.

    Args:
        crystals: all of them, (B, \\*).
        family: ``"matter"`` or ``"diffcsp"``.
        elements: the atomic numbers of a larger set they are from; None: those that occur.
        max_atoms: N; None: that of the data.
        sigma_min, sigma_max, type_scale, time_powers: see :class:`CrystalCodec`.
    """
    lattice, numbers, mask = (_field(crystals, name) for name in ("lattice", "numbers", "mask"))
    count, width = mask.sum(dim=1), mask.shape[1] if max_atoms is None else max_atoms
    density = float(count.sum() / torch.linalg.det(lattice.to(torch.float64)).sum())
    spread = LatticeCode(density, 1.0, _checked_family(family)).encode(lattice.to(torch.float32), count)
    return CrystalCodec(
        elements=torch.unique(numbers[mask]).tolist() if elements is None else list(elements),
        density=density,
        lattice_std=max(float(spread.square().mean().sqrt()), 1e-3),
        family=family,
        type_scale=type_scale,
        max_atoms=width,
        num_atoms=torch.bincount(count, minlength=width + 1)[1 : width + 1].tolist(),
        sigma_min=sigma_min,
        sigma_max=sigma_max,
        time_powers=dict(time_powers or {}),
        num_atoms_by_group=_counts_by_group(crystals.get("space_group"), count, width),
    )


def _counts_by_group(groups: Tensor | None, count: Tensor, width: int) -> dict[str, list[int]] | None:
    if groups is None:
        return None
    table = torch.zeros(231, width + 1, dtype=torch.int64)
    table.index_put_((groups, count), torch.ones_like(count), accumulate=True)
    return {str(g): table[g, 1:].tolist() for g in torch.unique(groups).tolist() if g > 0}


# ---- checks ----------------------------------------------------------------------------------------------------------

_PHYSICAL = ("lattice", "coordinates", "numbers", "mask")


def _field(values: Mapping[str, Tensor], name: str) -> Tensor:
    if not isinstance(values, Mapping) or name not in values:
        known = list(values) if isinstance(values, Mapping) else type(values).__name__
        raise ConfigError(f"there is no {name!r} among {known}; expected crystals as a dict of tensors")
    return values[name]


def _zero_padding(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.unsqueeze(-1), x, 0.0)


def _refuse_rotated(lattice: Tensor) -> None:
    skew = (lattice - lattice.mT).abs().amax() if lattice.numel() else lattice.new_zeros(())
    if bool(skew > 1e-3):
        raise ConfigError(
            f"lattices are not symmetric (entries differ by up to {float(skew):.3g} Å); expected the polar part: "
            "structures.polar_lattice(lattice, coordinates)"
        )


def _checked_family(family: Any) -> Family:
    if family not in get_args(Family):
        known = get_args(Family)
        raise ConfigError(f"family={family!r}; expected one of {', '.join(known)}.{nearest(str(family), known)}")
    return family


def _checked_elements(elements: Any) -> tuple[int, ...]:
    values = tuple(elements) if isinstance(elements, Sequence) and not isinstance(elements, str) else ()
    numbers = tuple(checked_count("elements", n, "atomic numbers") for n in values)
    if not numbers or list(numbers) != sorted(set(numbers)) or numbers[-1] > len(_SYMBOLS):
        raise ConfigError(f"elements={elements!r}; expected increasing atomic numbers from 1 to {len(_SYMBOLS)}")
    return numbers


def _checked_probabilities(values: Any, size: int) -> tuple[float, ...]:
    if values is None:
        return (1.0 / size,) * size
    numbers = tuple(float(v) for v in values)
    if len(numbers) != size or min(numbers) < 0.0 or not 0.0 < sum(numbers) < math.inf:
        raise ConfigError(f"num_atoms={values!r}; expected {size} probabilities or counts, for 1 to {size} atoms")
    return tuple(v / sum(numbers) for v in numbers)


def _atomic_number(key: Any) -> int:
    if isinstance(key, str):
        if key not in _SYMBOLS:
            raise ConfigError(f"formula has the element {key!r}, which is unknown.{nearest(key, _SYMBOLS)}")
        return _SYMBOLS.index(key) + 1
    return checked_count("formula's element", key, "a symbol or an atomic number")
