"""Relaxation of atoms and cells, a whole batch of crystals at once.

FIRE (Bitzek et al., Phys. Rev. Lett. 97 (2006) 170201) as ASE implements it, each crystal with its own time step, on
the atoms' positions and, as in ASE's ``FrechetCellFilter``, on n times the logarithm of the cell's deformation; forces
on these are -dE/dr and -V stress / n. Crystals that have converged drop out, so the cost falls as a batch relaxes. The
minima are ASE's; the paths to them differ slightly, since each step composes with the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from genkit._checks import checked_count, checked_number
from genkit.errors import ConfigError
from genkit.pipelines.crystal_tree_search.potentials import Potential, PotentialFailure
from genkit.pipelines.crystal_tree_search.structures import Crystals, check_crystals, polar_lattice, take

__all__ = ["Relaxation", "RelaxationSettings", "displacement", "relax"]


@dataclass(frozen=True)
class RelaxationSettings:
    """How far a relaxation goes.

    Args:
        steps: at most; each costs one evaluation of energy, forces and stress per crystal that still moves.
        fmax: a crystal has converged when no atom's force, and no row of the cell's, is longer (eV / Angstrom).
        cell: whether the cell moves too.
        max_volume_change: a crystal whose volume leaves [1 / this, this] times the first one is given up.
        max_step: of an atom, or of n times the strain, in one step (Angstrom).
    """

    steps: int = 60
    fmax: float = 0.05
    cell: bool = True
    max_volume_change: float = 2.0
    max_step: float = 0.2

    def __post_init__(self) -> None:
        checked_count("steps", self.steps, "a number of steps, at least 0", 0)
        checked_number("fmax", self.fmax, "a positive force in eV/Angstrom", lambda value: value > 0)
        checked_number("max_volume_change", self.max_volume_change, "a factor above 1", lambda value: value > 1)
        checked_number("max_step", self.max_step, "a positive length in Angstrom", lambda value: value > 0)


@dataclass(frozen=True)
class Relaxation:
    """What a relaxation reached.

    Args:
        crystals: B relaxed crystals (of those given up, the last good state; of those not asked for, the input).
        energy: (B,) float64, eV per atom, of these crystals; NaN where not valid.
        first_energy: (B,) float64, before.
        rmsd: (B,) float64, Angstrom, see :func:`displacement`; NaN where not valid.
        volume_ratio: (B,) float64, after over before.
        converged: (B,) bool, by ``fmax``.
        valid: (B,) bool: relaxed, converged or not; False where the potential failed or the volume ran away.
        steps: (B,) int64, steps taken.
        failures: why crystals were given up.
        settings: that made it.
        potential: name and version.
    """

    crystals: Crystals
    energy: Tensor
    first_energy: Tensor
    rmsd: Tensor
    volume_ratio: Tensor
    converged: Tensor
    valid: Tensor
    steps: Tensor
    failures: tuple[PotentialFailure, ...]
    settings: RelaxationSettings
    potential: str


@dataclass
class _State:
    """Crystals that move, float64, with FIRE's variables; every field has one row a crystal."""

    row: Tensor
    lattice: Tensor
    coordinates: Tensor
    mask: Tensor
    numbers: Tensor
    velocity: Tensor  # (b, N + 3, 3): atoms, then the cell
    dt: Tensor
    mixing: Tensor
    downhill: Tensor

    def keep(self, kept: Tensor) -> _State:
        return _State(*(getattr(self, one.name)[kept] for one in fields(self)))

    def crystals(self) -> Crystals:
        return {
            "lattice": self.lattice.float(),
            "coordinates": self.coordinates.float(),
            "numbers": self.numbers,
            "mask": self.mask,
        }


def relax(
    crystals: Mapping[str, Tensor],
    potential: Potential,
    settings: RelaxationSettings | None = None,
    *,
    select: Tensor | None = None,
) -> Relaxation:
    """Relaxes crystals to a minimum of a potential, all at once.

    Args:
        crystals: B of them.
        potential: of energies, forces and stresses.
        settings: None: the defaults.
        select: (B,) bool, which to relax; None: all. Ask for the valid ones (:mod:`.validity`).

    Raises:
        ConfigError: fields of another shape.
    """
    settings = settings or RelaxationSettings()
    size, _ = check_crystals(crystals)
    if select is not None and select.shape != (size,):
        raise ConfigError(f"select has shape {tuple(select.shape)}; expected ({size},) booleans")
    run = _Run(crystals, potential, settings)
    rows = torch.arange(size) if select is None else torch.nonzero(select.bool().cpu()).squeeze(1)
    state = run.begin(rows)
    for step in range(settings.steps + 1):
        state, forces = run.evaluate(state, step)
        if not len(state.row) or step == settings.steps:
            break
        state = _advance(state, forces, settings)
        state = run.bounded(state)
    return run.result()


class _Run:
    """Bookkeeping over the whole batch: the best known state of each row, and why rows left."""

    def __init__(self, crystals: Mapping[str, Tensor], potential: Potential, settings: RelaxationSettings) -> None:
        self.start = {name: value.detach().cpu() for name, value in take(crystals, slice(None)).items()}
        self.potential, self.settings = potential, settings
        size = len(self.start["numbers"])
        self.lattice, self.coordinates = self.start["lattice"].double(), self.start["coordinates"].double()
        self.volume = torch.linalg.det(self.lattice).abs()
        self.energy = torch.full((size,), torch.nan, dtype=torch.float64)
        self.first_energy = self.energy.clone()
        self.converged = torch.zeros(size, dtype=torch.bool)
        self.lost = torch.ones(size, dtype=torch.bool)
        self.steps = torch.zeros(size, dtype=torch.int64)
        self.failures: list[PotentialFailure] = []

    def begin(self, rows: Tensor) -> _State:
        self.lost[rows] = False
        atoms, one = self.start["numbers"].shape[1], torch.ones(len(rows), dtype=torch.float64)
        return _State(
            row=rows,
            lattice=self.lattice[rows],
            coordinates=self.coordinates[rows],
            mask=self.start["mask"].bool()[rows],
            numbers=self.start["numbers"][rows],
            velocity=torch.zeros(len(rows), atoms + 3, 3, dtype=torch.float64),
            dt=0.1 * one,
            mixing=0.1 * one,
            downhill=torch.zeros(len(rows), dtype=torch.int64),
        )

    def evaluate(self, state: _State, step: int) -> tuple[_State, Tensor]:
        """The crystals that still move, and the forces (b, N + 3, 3) on atoms and cell."""
        output = self.potential.energy_forces_stress(state.crystals())
        if output.forces is None or output.stress is None:
            raise ConfigError(f"{self.potential.name} gives no forces and stresses, which a relaxation needs")
        for failure in output.failures:
            self._lose(int(state.row[failure.row]), failure.kind, f"step {step}: {failure.message}")
        good = output.valid
        rows = state.row[good]
        self.energy[rows], self.steps[rows] = output.energy[good], step
        self.lattice[rows], self.coordinates[rows] = state.lattice[good], state.coordinates[good]
        if step == 0:
            self.first_energy[rows] = output.energy[good]
        forces = _generalised_forces(state.keep(good), output.forces[good], output.stress[good], self.settings.cell)
        done = forces.norm(dim=-1).amax(-1) < self.settings.fmax
        self.converged[rows[done]] = True
        return state.keep(good).keep(~done), forces[~done]

    def bounded(self, state: _State) -> _State:
        """Without the crystals whose volume ran away."""
        ratio = torch.linalg.det(state.lattice).abs() / self.volume[state.row]
        limit = self.settings.max_volume_change
        away = ~((ratio >= 1 / limit) & (ratio <= limit))
        for row, value in zip(state.row[away].tolist(), ratio[away].tolist(), strict=True):
            self._lose(row, "volume", f"the volume came to {value:.2f} times the first one")
        return state.keep(~away)

    def _lose(self, row: int, kind: str, message: str) -> None:
        self.lost[row] = True
        self.failures.append(PotentialFailure(row, kind, message))

    def result(self) -> Relaxation:
        valid = ~self.lost & torch.isfinite(self.energy)
        lattice, coordinates = polar_lattice(self.lattice, self.coordinates)
        mask = self.start["mask"].bool()
        wrapped = coordinates.float().remainder(1.0)
        wrapped = torch.where(wrapped >= 1.0, torch.zeros_like(wrapped), wrapped) * mask.unsqueeze(-1)
        # rows that never moved keep their exact input, a broken lattice included
        moved = (self.steps > 0) & valid
        relaxed = {
            "lattice": torch.where(moved[:, None, None], lattice.float(), self.start["lattice"].float()),
            "coordinates": torch.where(moved[:, None, None], wrapped, self.start["coordinates"].float()),
            "numbers": self.start["numbers"],
            "mask": mask,
        }
        rmsd = displacement(self.start["lattice"], self.start["coordinates"], self.lattice, self.coordinates, mask)
        nothing = torch.full_like(rmsd, torch.nan)
        return Relaxation(
            crystals=relaxed,
            energy=torch.where(valid, self.energy, nothing),
            first_energy=self.first_energy,
            rmsd=torch.where(valid, rmsd, nothing),
            volume_ratio=torch.where(valid, torch.linalg.det(self.lattice).abs() / self.volume, nothing),
            converged=self.converged & valid,
            valid=valid,
            steps=self.steps,
            failures=tuple(self.failures),
            settings=self.settings,
            potential=f"{self.potential.name} {self.potential.version}",
        )


def _generalised_forces(state: _State, forces: Tensor, stress: Tensor, cell: bool) -> Tensor:
    """(b, N + 3, 3): forces on the atoms, and -V stress / n on n times the strain."""
    volume = torch.linalg.det(state.lattice).abs()
    symmetric = (stress + stress.mT) / 2
    count = state.mask.sum(1).clamp_min(1)
    pull = -(volume / count)[:, None, None] * symmetric
    return torch.cat((forces * state.mask.unsqueeze(-1), pull if cell else torch.zeros_like(pull)), dim=1)


def _advance(state: _State, forces: Tensor, settings: RelaxationSettings) -> _State:
    """One step of FIRE, each crystal with its own time step; ASE's constants."""
    power = (forces * state.velocity).sum((1, 2))
    down = power > 0
    scale = state.velocity.norm(dim=(1, 2)) / forces.norm(dim=(1, 2)).clamp_min(1e-300)
    mixing = state.mixing[:, None, None]
    velocity = (1 - mixing) * state.velocity + mixing * scale[:, None, None] * forces
    velocity = torch.where(down[:, None, None], velocity, torch.zeros_like(velocity))
    faster = down & (state.downhill > 5)
    dt = torch.where(faster, (1.1 * state.dt).clamp_max(1.0), torch.where(down, state.dt, 0.5 * state.dt))
    mixing_next = torch.where(down, torch.where(faster, 0.99 * state.mixing, state.mixing), torch.full_like(dt, 0.1))
    velocity = velocity + dt[:, None, None] * forces
    step = dt[:, None, None] * velocity
    length = step.norm(dim=(1, 2))
    step = step * (settings.max_step / length.clamp_min(settings.max_step))[:, None, None]
    lattice, coordinates = _moved(state, step)
    return _State(
        row=state.row,
        lattice=lattice,
        coordinates=coordinates,
        mask=state.mask,
        numbers=state.numbers,
        velocity=velocity,
        dt=dt,
        mixing=mixing_next,
        downhill=torch.where(down, state.downhill + 1, torch.zeros_like(state.downhill)),
    )


def _moved(state: _State, step: Tensor) -> tuple[Tensor, Tensor]:
    """Cell and fractional coordinates after a step of the atoms (in the old cell) and of n times the strain."""
    atoms = state.mask.shape[1]
    shift = torch.linalg.solve(state.lattice, step[:, :atoms], left=False)
    strain = step[:, atoms:] / state.mask.sum(1).clamp_min(1)[:, None, None]
    return state.lattice @ torch.linalg.matrix_exp(strain), state.coordinates + shift


def displacement(first_lattice: Tensor, first: Tensor, second_lattice: Tensor, second: Tensor, mask: Tensor) -> Tensor:
    """Root mean square displacement (B,) in Angstrom of atoms that correspond, without drift and without strain.

    Fractional displacements (nearest image, minus their mean) are measured in the mean of the two cells; what the cell
    itself did is told by its volume. No matching is tried, so there is none that can fail and be left out of an
    average.

    Args:
        first_lattice: (B, 3, 3).
        first: (B, N, 3) fractional coordinates.
        second_lattice: (B, 3, 3), in the orientation of the first.
        second: (B, N, 3).
        mask: (B, N) bool.
    """
    difference = second.double() - first.double()
    difference = torch.where(mask.unsqueeze(-1), difference - difference.round(), torch.zeros_like(difference))
    count = mask.sum(1).clamp_min(1)
    drift = difference.sum(1) / count.unsqueeze(1)
    centred = torch.where(mask.unsqueeze(-1), difference - drift.unsqueeze(1), torch.zeros_like(difference))
    moved = centred @ ((first_lattice.double() + second_lattice.double()) / 2)
    return (moved.square().sum((1, 2)) / count).sqrt()
