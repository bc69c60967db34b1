"""Times energies of batches of crystals beside single ones, CHGNet's own batches, and a relaxation beside ASE's.

64 crystals of 2 to 8 atoms (rock salt, fluorite, perovskite and a double cell, rattled), CHGNet 0.3.0, one thread.
``single``: one crystal after another through genkit; ``chgnet``: ``CHGNet.predict_structure`` in batches of 16 (its
default); ``chgnet_single``: one at a time. All give the same energies, which is checked. The relaxation is one step of
forces and stresses of the batch, against the calculator that ASE's optimisers would call crystal by crystal.

Run: ``python benchmarks/rewards.py [--repeats 5]`` (about 30 s on one core).
"""

from __future__ import annotations

import argparse
import importlib.util
import warnings
from typing import Any

import numpy as np
import torch
from _bench import bench_line, info_line, interleaved, one_thread, ratio

from genkit.pipelines.crystal_tree_search.hull import Hull
from genkit.pipelines.crystal_tree_search.potentials import CHGNetPotential
from genkit.pipelines.crystal_tree_search.rewards import StabilityReward
from genkit.pipelines.crystal_tree_search.structures import from_structures, take, to_atoms, to_structures

COUNT = 64
GOALS = {
    "energy_batched_vs_single": "<=0.5",
    "energy_batched_vs_chgnet_batch16": "<=0.85",
    "forces_batched_vs_ase": "<=0.5",
}


def crystals(count: int = COUNT, seed: int = 0) -> dict[str, torch.Tensor]:
    """Rattled members of four families, 2 to 8 atoms, 4 on average."""
    from pymatgen.core import Lattice, Structure

    face, random = (np.ones((3, 3)) - np.eye(3)) / 2, np.random.default_rng(seed)
    salt = Structure(Lattice(face * 5.69), ["Na", "Cl"], [[0, 0, 0], [0.5] * 3])
    fluorite = Structure(Lattice(face * 5.5), ["Ca", "F", "F"], [[0, 0, 0], [0.25] * 3, [0.75] * 3])
    perovskite = Structure(
        Lattice.cubic(3.905), ["Sr", "Ti", "O", "O", "O"], [[0, 0, 0], [0.5] * 3, *(1 - np.eye(3)) * 0.5]
    )
    double = salt.copy().make_supercell([2, 2, 1], in_place=False)
    found = []
    for row in range(count):
        one = (salt, fluorite, perovskite, salt, fluorite, double)[row % 6]
        cell = one.lattice.matrix @ (np.eye(3) + 0.02 * random.normal(size=(3, 3)))
        shifts = 0.05 * random.normal(size=(len(one), 3)) @ np.linalg.inv(cell)
        found.append(Structure(Lattice(cell), one.species, one.frac_coords + shifts))
    return from_structures(found, 8)


def energies(batch: dict[str, torch.Tensor], potential: CHGNetPotential, repeats: int) -> list[str]:
    rows = [take(batch, slice(row, row + 1)) for row in range(COUNT)]
    structures, network = to_structures(batch), potential.model

    def peer(size: int) -> Any:
        return network.predict_structure(structures, task="e", batch_size=size)

    def single() -> torch.Tensor:
        return torch.cat([potential.energies(row).energy for row in rows])

    together = potential.energies(batch).energy
    theirs = torch.tensor([float(one["e"]) for one in peer(16)], dtype=torch.float64)
    for name, values in (("single", single()), ("chgnet", theirs)):
        if not float((together - values).abs().max()) < 1e-5:
            raise SystemExit(
                f"batched energies differ from {name}'s by {float((together - values).abs().max()):.1e} eV"
            )
    functions = {
        "batched": lambda: potential.energies(batch),
        "single": single,
        "chgnet_batch16": lambda: peer(16),
        "chgnet_single": lambda: peer(1),
    }
    seconds = interleaved(functions, repeats, warmup=1)
    for name, values in seconds.items():
        print(f"energy {name}: {1e3 * float(np.median(values)) / COUNT:.2f} ms a crystal")
    measured = {f"energy_batched_vs_{name}": ratio(seconds["batched"], seconds[name]) for name in list(seconds)[1:]}
    return [bench_line(name, one, GOALS.get(name)) for name, one in measured.items()]


def whole_reward(batch: dict[str, torch.Tensor], potential: CHGNetPotential, repeats: int) -> list[str]:
    """What validity and the hull add to the energies."""
    elements = [11, 17, 20, 9, 38, 22, 8]
    hull = Hull.from_arrays([[number] for number in elements], [-1.0] * len(elements))
    reward = StabilityReward(potential, hull)
    seconds = interleaved(
        {"reward": lambda: reward(batch), "energy": lambda: potential.energies(batch)}, repeats, warmup=1
    )
    return [info_line("stability_reward_vs_energy", ratio(seconds["reward"], seconds["energy"]), "validity and hull")]


def forces(batch: dict[str, torch.Tensor], potential: CHGNetPotential, repeats: int) -> list[str]:
    from chgnet.model.dynamics import CHGNetCalculator

    few = take(batch, slice(0, 24))
    calculator = CHGNetCalculator(potential.model)
    atoms = to_atoms(few)

    def by_ase() -> None:
        for one in atoms:
            calculator.calculate(one, task="efs")

    seconds = interleaved(
        {"batched": lambda: potential.energy_forces_stress(few), "ase": by_ase}, max(repeats // 2, 3), warmup=1
    )
    for name, values in seconds.items():
        print(f"energy, forces and stress {name}: {1e3 * float(np.median(values)) / len(atoms):.2f} ms a crystal")
    return [
        bench_line("forces_batched_vs_ase", ratio(seconds["batched"], seconds["ase"]), GOALS["forces_batched_vs_ase"])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repeats")
    repeats = parser.parse_args().repeats
    one_thread()
    if not importlib.util.find_spec("chgnet"):
        print("SKIP chgnet: not installed")
        return
    warnings.simplefilter("ignore", UserWarning)
    batch, potential = crystals(), CHGNetPotential()
    print(f"{COUNT} crystals, {float(batch['mask'].sum(1).float().mean()):.1f} atoms on average")
    lines = energies(batch, potential, repeats)
    lines += whole_reward(batch, potential, repeats)
    lines += forces(batch, potential, repeats)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
