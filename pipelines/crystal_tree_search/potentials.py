"""Energies, forces and stresses of batches of crystals from machine-learned potentials, one failure at a time.

A potential never raises for a crystal that it cannot judge: the crystal is masked, recorded
(:class:`PotentialFailure`), and the others of its batch get their numbers. What fails before any crystal is looked at,
such as a package that is not installed, is raised. Batches are cut at fixed positions (rows 0
to 63, 64 to 127, …), so that which process does which part changes no bit of an energy.

CHGNet (Deng et al., Nature Machine Intelligence 2023) ships its weights in its wheel. Its own graphs are made one
structure at a time, in Python; here the graphs of a whole batch are made by tensor operations, which is what most of
the time of an energy went into. The graphs are the same up to the order of bonds; a check at load time compares both,
and falls back on CHGNet's converters where they differ.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from genkit._checks import checked_count
from genkit.errors import ConfigError, nearest
from genkit.pipelines.crystal_tree_search.structures import (
    Crystals,
    check_crystals,
    optional_module,
    take,
    to_atoms,
    to_structures,
)
from genkit.pipelines.crystal_tree_search.validity import neighbor_pairs

__all__ = [
    "ASECalculatorPotential",
    "BatchedPotential",
    "CHGNetPotential",
    "GraphBackend",
    "Potential",
    "PotentialFailure",
    "PotentialOutput",
    "SevenNetPotential",
]

GraphBackend = Literal["vectorised", "fast", "legacy"]

#: eV / Angstrom^3 in GPa.
_GPA = 160.21766208
#: Volumes per atom (Angstrom^3) below this would give graphs of millions of bonds.
_DENSEST = 1.0


@dataclass(frozen=True)
class PotentialFailure:
    """A crystal that a potential could not judge.

    Args:
        row: of the batch.
        kind: ``not_finite``, ``singular_cell``, ``too_dense``, ``isolated_atom``, ``not_finite_energy`` or ``raised``.
        message: what was found.
    """

    row: int
    kind: str
    message: str


@dataclass(frozen=True)
class PotentialOutput:
    """What a potential says about B crystals.

    Args:
        energy: (B,) float64, eV per atom; NaN where not valid.
        valid: (B,) bool.
        failures: the crystals that were asked for and could not be judged.
        forces: (B, N, 3) float64, eV / Angstrom, 0 at padding and where not valid; None unless asked for.
        stress: (B, 3, 3) float64, eV / Angstrom^3, positive under tension; None unless asked for.
    """

    energy: Tensor
    valid: Tensor
    failures: tuple[PotentialFailure, ...] = ()
    forces: Tensor | None = None
    stress: Tensor | None = None


@runtime_checkable
class Potential(Protocol):
    """What the rewards, the hull and the relaxation need of a potential; ``name`` and ``version`` go into records."""

    @property
    def name(self) -> str:
        """Of the potential, for records."""

    @property
    def version(self) -> str:
        """Of its weights, for records."""

    def energies(self, crystals: Mapping[str, Tensor], select: Tensor | None = None) -> PotentialOutput:
        """Energies of the rows where ``select`` (B,) bool is True (None: all); the others are NaN, and no failures."""

    def energy_forces_stress(self, crystals: Mapping[str, Tensor], select: Tensor | None = None) -> PotentialOutput:
        """The same with forces and stress."""


@dataclass
class _Columns:
    """The output while it is being filled."""

    energy: Tensor
    forces: Tensor | None
    stress: Tensor | None
    failures: list[PotentialFailure] = field(default_factory=list)


class BatchedPotential(ABC):
    """Chunks, masks and records; a subclass says what one chunk is.

    Args:
        chunk: rows of the batch that are cut off together, at fixed positions.
        max_atoms: atoms evaluated at once (memory grows with the atoms, not with the structures).
    """

    def __init__(self, chunk: int = 64, max_atoms: int = 512) -> None:
        self.chunk = checked_count("chunk", chunk)
        self.max_atoms = checked_count("max_atoms", max_atoms)

    @abstractmethod
    def _evaluate(self, crystals: Crystals, derivatives: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(energy per atom (b,), forces (b, N, 3), stress (b, 3, 3)) of crystals that are all finite."""

    def prepare(self) -> None:  # noqa: B027  (most have nothing to load)
        """Loads what is loaded on first use; the base has nothing to load.

        What this raises (a missing package, say) is raised to the caller: no crystal is at fault for it.
        """

    def energies(self, crystals: Mapping[str, Tensor], select: Tensor | None = None) -> PotentialOutput:
        """See :class:`Potential`.

        Raises:
            ConfigError: fields of another shape.
        """
        return self._run(crystals, select, derivatives=False)

    def energy_forces_stress(self, crystals: Mapping[str, Tensor], select: Tensor | None = None) -> PotentialOutput:
        """See :class:`Potential`.

        Raises:
            ConfigError: fields of another shape.
        """
        return self._run(crystals, select, derivatives=True)

    def _run(self, crystals: Mapping[str, Tensor], select: Tensor | None, derivatives: bool) -> PotentialOutput:
        size, atoms = check_crystals(crystals)
        columns = _Columns(
            torch.full((size,), torch.nan, dtype=torch.float64),
            torch.zeros(size, atoms, 3, dtype=torch.float64) if derivatives else None,
            torch.zeros(size, 3, 3, dtype=torch.float64) if derivatives else None,
        )
        wanted = torch.ones(size, dtype=torch.bool) if select is None else select.bool().cpu()
        rows, refused = _presentable(crystals, wanted)
        columns.failures += refused
        if len(rows):
            self.prepare()
        for group in self._groups(rows, crystals["mask"].sum(1).cpu(), size):
            self._fill(columns, crystals, group, derivatives)
        valid = torch.isfinite(columns.energy)
        return PotentialOutput(columns.energy, valid, tuple(columns.failures), columns.forces, columns.stress)

    def _groups(self, rows: Tensor, counts: Tensor, size: int) -> Iterator[Tensor]:
        """Rows by the fixed chunk that they stand in, cut again where there are too many atoms."""
        for start in range(0, size, self.chunk):
            inside = rows[(rows >= start) & (rows < start + self.chunk)]
            group: list[int] = []
            total = 0
            for row in inside.tolist():
                if group and total + int(counts[row]) > self.max_atoms:
                    yield torch.tensor(group)
                    group, total = [], 0
                group.append(row)
                total += int(counts[row])
            if group:
                yield torch.tensor(group)

    def _fill(self, columns: _Columns, crystals: Mapping[str, Tensor], rows: Tensor, derivatives: bool) -> None:
        try:
            energy, forces, stress = self._evaluate(take(crystals, rows), derivatives)
        except Exception as error:  # whatever a potential raises: the other crystals of the batch are innocent
            if len(rows) > 1:
                for row in rows:
                    self._fill(columns, crystals, row[None], derivatives)
                return
            columns.failures.append(PotentialFailure(int(rows[0]), "raised", f"{type(error).__name__}: {error}"))
            return
        good = torch.isfinite(energy)
        if forces is not None and stress is not None:
            good &= torch.isfinite(forces).flatten(1).all(1) & torch.isfinite(stress).flatten(1).all(1)
        for row, value in zip(rows[~good].tolist(), energy[~good].tolist(), strict=True):
            columns.failures.append(PotentialFailure(row, "not_finite_energy", f"energy {value} or its derivatives"))
        columns.energy[rows[good]] = energy[good].double().cpu()
        if columns.forces is not None and columns.stress is not None and forces is not None and stress is not None:
            columns.forces[rows[good]] = forces[good].double().cpu()
            columns.stress[rows[good]] = stress[good].double().cpu()


def _presentable(crystals: Mapping[str, Tensor], wanted: Tensor) -> tuple[Tensor, list[PotentialFailure]]:
    """Rows that make a graph, and a record of the others."""
    lattice = crystals["lattice"].detach().double().cpu()
    mask = crystals["mask"].bool().cpu()
    coordinates = crystals["coordinates"].detach().cpu()
    finite = torch.isfinite(lattice).flatten(1).all(1) & (torch.isfinite(coordinates).all(-1) | ~mask).all(1)
    lattice = torch.where(finite[:, None, None], lattice, torch.zeros_like(lattice))
    volume = torch.linalg.det(lattice).abs()
    flat = volume < 1e-6 + 1e-9 * lattice.norm(dim=-1).prod(-1)
    reasons = {
        "not_finite": (~finite, "a lattice or a coordinate is not finite"),
        "singular_cell": (finite & (flat | ~mask.any(1)), "no volume, or no atom"),
        "too_dense": (finite & ~flat & (volume < _DENSEST * mask.sum(1)), f"less than {_DENSEST} A^3 per atom"),
    }
    good, failures = wanted.clone(), []
    for kind, (bad, message) in reasons.items():
        failures += [PotentialFailure(row, kind, message) for row in torch.nonzero(bad & wanted).squeeze(1).tolist()]
        good &= ~bad
    return torch.nonzero(good).squeeze(1), failures


# --- CHGNet -----------------------------------------------------------------------------------------------------------


class CHGNetPotential(BatchedPotential):
    """CHGNet with the weights of its wheel, loaded on first use.

    Args:
        model: ``"0.3.0"``, ``"0.2.0"`` or ``"r2scan"`` (another functional: never mix it with the others).
        device: ``"cpu"`` or a CUDA device.
        backend: ``"vectorised"`` graphs of this module; ``"fast"`` and ``"legacy"``, CHGNet's converters in C and in
            Python. What does not work here, or gives other numbers, is left for the next one with a warning.
        chunk: see :class:`BatchedPotential`.
        max_atoms: see :class:`BatchedPotential`.

    Raises:
        ConfigError: an unknown model or backend.
        MissingExtraError: on first use, where chgnet is not installed.
    """

    def __init__(
        self,
        model: str = "0.3.0",
        *,
        device: str = "cpu",
        backend: GraphBackend = "vectorised",
        chunk: int = 64,
        max_atoms: int = 512,
    ) -> None:
        super().__init__(chunk, max_atoms)
        for name, value, known in (
            ("model", model, ("0.3.0", "0.2.0", "r2scan")),
            ("backend", backend, get_args(GraphBackend)),
        ):
            if value not in known:
                raise ConfigError(f"{name}={value!r}; expected one of {', '.join(known)}.{nearest(value, known)}")
        self.model_name, self.device, self.backend = model, device, backend
        self._model: Any = None

    @property
    def name(self) -> str:
        """``CHGNet``."""
        return "CHGNet"

    @property
    def version(self) -> str:
        """Of the weights."""
        return self.model_name

    def __getstate__(self) -> dict[str, Any]:
        """Without the network, which another process loads itself."""
        return {**self.__dict__, "_model": None}

    def __repr__(self) -> str:
        return f"CHGNetPotential({self.model_name}, {self.backend})"

    @property
    def model(self) -> Any:
        """The ``chgnet.model.CHGNet`` network."""
        if self._model is None:
            self._model = _load_chgnet(self.model_name, self.device)
            self.backend = self._working_backend()
        return self._model

    def prepare(self) -> None:
        """Loads the network now, not on first use."""
        _ = self.model

    def _working_backend(self) -> GraphBackend:
        """The wanted backend, or the next that agrees with CHGNet's own path on a known crystal."""
        order: tuple[GraphBackend, ...] = get_args(GraphBackend)
        crystals = _sodium_chloride()
        for backend in order[order.index(self.backend) :]:
            with contextlib.suppress(Exception):
                energy = float(self._by_backend(crystals, backend, False)[0][0])
                if abs(energy - _CHECK_ENERGY[self.model_name]) < 1e-3:
                    return backend
            warnings.warn(f"CHGNet's {backend} graphs do not work here; trying the next converter", stacklevel=4)
        raise ConfigError(
            f"CHGNet {self.model_name} does not give the energy of NaCl that it should, with any graph converter; "
            "chgnet 0.4.2 with pymatgen 2026.10 does"
        )

    def _evaluate(self, crystals: Crystals, derivatives: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        _ = self.model
        return self._by_backend(crystals, self.backend, derivatives)

    def _by_backend(
        self, crystals: Crystals, backend: GraphBackend, derivatives: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if backend == "vectorised":
            return _vectorised(self._model, crystals, derivatives, self.device)
        return _by_converter(self._model, crystals, backend, derivatives, self.device)


def _sodium_chloride() -> Crystals:
    """Primitive rock salt, a = 5.69 A."""
    half = 5.69 / 2
    return {
        "lattice": torch.tensor([[[0.0, half, half], [half, 0.0, half], [half, half, 0.0]]]),
        "coordinates": torch.tensor([[[0.0, 0.0, 0.0], [0.5, 0.5, 0.5]]]),
        "numbers": torch.tensor([[11, 17]]),
        "mask": torch.ones(1, 2, dtype=torch.bool),
    }


def _load_chgnet(name: str, device: str) -> Any:
    chgnet = optional_module("chgnet.model")
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = chgnet.CHGNet.load(model_name=name, use_device=device, verbose=False)
    return network.eval().requires_grad_(False)


def _by_converter(
    network: Any, crystals: Crystals, algorithm: str, derivatives: bool, device: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """CHGNet's public path: one graph after another, then one batch."""
    graph = optional_module("chgnet.graph")
    cutoffs = {name: getattr(network.graph_converter, name) for name in ("atom_graph_cutoff", "bond_graph_cutoff")}
    converter = graph.CrystalGraphConverter(algorithm=algorithm, **cutoffs)
    structures = to_structures(crystals)
    for structure in structures:
        structure.to = lambda **_: None  # a failing converter would leave a CIF file in the current folder
    graphs = [converter(structure).to(device) for structure in structures]
    with torch.set_grad_enabled(derivatives):
        found = network(graphs, task="efs" if derivatives else "e")
    if not derivatives:
        return found["e"].detach(), None, None
    forces = torch.zeros(crystals["coordinates"].shape, dtype=torch.float32)
    for row, force in enumerate(found["f"]):
        forces[row, : len(force)] = force.detach().cpu()
    return found["e"].detach(), forces, torch.stack(list(found["s"])).detach() / _GPA


def _vectorised(
    network: Any, crystals: Crystals, derivatives: bool, device: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same numbers from graphs that tensor operations make, and one backward pass."""
    crystals = {name: value.detach().to(device) for name, value in crystals.items()}
    mask, counts = crystals["mask"].bool(), crystals["mask"].sum(1)
    with torch.set_grad_enabled(derivatives):
        strain = torch.zeros(len(mask), 3, 3, device=device, requires_grad=derivatives)
        lattice = crystals["lattice"].float() @ (torch.eye(3, device=device) + strain)
        positions = (crystals["coordinates"].float() @ lattice)[mask]
        batch = _batched_graph(network, crystals, lattice, positions)
        atoms = SimpleNamespace  # the composition model reads nothing else of a graph
        parts = batch.atomic_numbers.split(counts.tolist())
        energy = network._compute(batch)["e"] + network.composition_model([atoms(atomic_number=p) for p in parts])
        if not derivatives:
            return energy, None, None
        gradients = torch.autograd.grad((energy * counts).sum(), [positions, strain])
    forces = torch.zeros_like(crystals["coordinates"], dtype=torch.float32)
    forces[mask] = -gradients[0]
    volume = torch.linalg.det(crystals["lattice"].double()).abs()
    return energy.detach(), forces, gradients[1].double() / volume[:, None, None]


def _batched_graph(network: Any, crystals: Crystals, lattice: Tensor, positions: Tensor) -> Any:
    """CHGNet's ``BatchedGraph`` of all crystals; bonds and angles as its converters choose them."""
    cutoffs, mask = network.graph_converter, crystals["mask"].bool()
    pairs = neighbor_pairs(crystals["lattice"], crystals["coordinates"], mask, cutoffs.atom_graph_cutoff)
    place = mask.flatten().cumsum(0).reshape(mask.shape) - 1
    first, second = place[pairs.crystal, pairs.i], place[pairs.crystal, pairs.j]
    _check_isolated(first, second, place[mask])
    shift = (pairs.image.to(lattice.dtype).unsqueeze(1) @ lattice[pairs.crystal]).squeeze(1)
    bonds = positions[first] - positions[second] - shift
    lengths = bonds.norm(dim=1)
    unit = bonds / lengths.unsqueeze(1)
    one, other, center = _angles(first, second, pairs.distance < cutoffs.bond_graph_cutoff)
    directed, number = torch.cat((unit, -unit)), len(first)
    radial = network.bond_basis_expansion
    return optional_module("chgnet.model.model").BatchedGraph(
        atomic_numbers=crystals["numbers"][mask],
        bond_bases_ag=radial.rbf_expansion_ag(lengths),
        bond_bases_bg=radial.rbf_expansion_bg(lengths),
        angle_bases=network.angle_basis_expansion(directed[one], directed[other]) if len(one) else torch.zeros(0),
        batched_atom_graph=torch.stack((torch.cat((first, second)), torch.cat((second, first))), 1),
        batched_bond_graph=torch.stack((center, one % number, other % number), 1) if len(one) else torch.zeros(0),
        atom_owners=torch.repeat_interleave(torch.arange(len(mask), device=mask.device), mask.sum(1)),
        directed2undirected=torch.arange(number, device=mask.device).repeat(2),
        atom_positions=[],
        strains=[],
        volumes=[],
    )


def _check_isolated(first: Tensor, second: Tensor, atoms: Tensor) -> None:
    joined = torch.zeros(len(atoms), dtype=torch.bool, device=atoms.device)
    joined[first] = True
    joined[second] = True
    if not bool(joined.all()):
        raise ConfigError(f"{int((~joined).sum())} isolated atoms, without any neighbour inside the cutoff")


def _angles(first: Tensor, second: Tensor, short: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(bond, other bond, centre) of every ordered pair of short directed bonds that leave one atom.

    Directed bond e < E is bond e, and e + E the same bond from its other end.
    """
    bonds = torch.nonzero(short.repeat(2)).squeeze(1)
    centers = torch.cat((first, second))[bonds]
    order = torch.argsort(centers, stable=True)
    bonds, centers = bonds[order], centers[order]
    sizes = torch.bincount(centers)
    starts = (sizes.cumsum(0) - sizes)[centers]
    partners = sizes[centers]  # of each bond, itself included
    one = torch.repeat_interleave(torch.arange(len(bonds), device=bonds.device), partners)
    rank = torch.arange(len(one), device=bonds.device) - (partners.cumsum(0) - partners)[one]
    other = starts[one] + rank
    kept = one != other
    return bonds[one[kept]], bonds[other[kept]], centers[one[kept]]


#: eV per atom of :func:`_sodium_chloride`, what a load is checked against.
_CHECK_ENERGY = {"0.3.0": -3.66797, "0.2.0": -3.68805, "r2scan": -6.86601}


# --- ASE --------------------------------------------------------------------------------------------------------------


class ASECalculatorPotential(BatchedPotential):
    """Any ASE calculator, one crystal at a time.

    Args:
        calculator: an ``ase.calculators.calculator.Calculator``, or a function without arguments that makes one (which
            is what a pool of processes needs, since calculators seldom can be sent to another process).
        name: for records; None: the class of the calculator.
        version: for records.
    """

    def __init__(self, calculator: Any, *, name: str | None = None, version: str = "unknown") -> None:
        super().__init__()
        made = not isinstance(calculator, type) and hasattr(calculator, "get_potential_energy")
        self._make: Callable[[], Any] | None = None if made else calculator
        self._calculator: Any = calculator if made else None
        self._name, self._version = name, version

    @property
    def name(self) -> str:
        """For records."""
        return self._name or type(self.calculator).__name__

    @property
    def version(self) -> str:
        """For records."""
        return self._version

    @property
    def calculator(self) -> Any:
        """The calculator, made on first use."""
        if self._calculator is None and self._make is not None:
            self._calculator = self._make()
        return self._calculator

    def prepare(self) -> None:
        """Makes the calculator now, not on first use."""
        _ = self.calculator

    def __getstate__(self) -> dict[str, Any]:
        """Without a calculator that can be made again."""
        return {**self.__dict__, "_calculator": None if self._make else self._calculator}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name or self._make or type(self._calculator).__name__})"

    def _groups(self, rows: Tensor, counts: Tensor, size: int) -> Iterator[Tensor]:
        yield from rows.unsqueeze(1)

    def _evaluate(self, crystals: Crystals, derivatives: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        atoms = to_atoms(crystals)[0]
        atoms.calc = self.calculator
        energy = torch.tensor([float(atoms.get_potential_energy()) / len(atoms)], dtype=torch.float64)
        if not derivatives:
            return energy, None, None
        forces = torch.zeros(crystals["coordinates"].shape, dtype=torch.float64)
        forces[0, : len(atoms)] = torch.as_tensor(np.array(atoms.get_forces(), dtype=np.float64))
        stress = torch.as_tensor(np.array(atoms.get_stress(voigt=False), dtype=np.float64))
        return energy, forces, stress.unsqueeze(0)


class SevenNetPotential(ASECalculatorPotential):
    """SevenNet, an independent judge of what a search found under CHGNet. Its energies have another reference: a hull
    for it is made of its own energies.

    Args:
        model: a checkpoint of the sevenn wheel, ``"7net-0"`` for instance.
        device: ``"cpu"`` or a CUDA device.

    Raises:
        MissingExtraError: on first use, where sevenn is not installed.
    """

    def __init__(self, model: str = "7net-0", *, device: str = "cpu") -> None:
        super().__init__(self._load, name="SevenNet", version=model)
        self.device = device

    def _load(self) -> Any:
        sevenn = optional_module("sevenn.calculator", "sevennet")
        return sevenn.SevenNetCalculator(model=self.version, device=self.device)
