"""The making of the set, with three prototypes and a potential in closed form in place of libraries and CHGNet."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch

from genkit.pipelines.crystal_tree_search import build_proto8
from genkit.pipelines.crystal_tree_search import proto8_candidates as shapes
from genkit.pipelines.crystal_tree_search.potentials import BatchedPotential
from genkit.pipelines.crystal_tree_search.proto8_candidates import CHARGES, Candidate, Prototype, candidates, uniform

pytest.importorskip("pymatgen.core")
pytest.importorskip("moyopy")

FCC = np.array([[0.0, 0.5, 0.5], [0.5, 0.0, 0.5], [0.5, 0.5, 0.0]])
PAIR = np.array([[0.0, 0.0, 0.0], [0.5, 0.5, 0.5]])
ROCKSALT = Prototype("AB_cF8_225_a_b", "toy", 225, FCC, (0, 1), PAIR)
CAESIUM = Prototype("AB_cP2_221_a_b", "toy", 221, np.eye(3), (0, 1), PAIR)
FLUORITE = Prototype("AB2_cF12_225_a_c", "toy", 225, FCC, (0, 1, 1), np.array([[0.0] * 3, [0.25] * 3, [0.75] * 3]))
METAL = Prototype("A_cF4_225_a", "toy", 225, FCC, (0,), np.zeros((1, 3)))


class Springs(BatchedPotential):
    """log(v / v0)² per atom with v the volume per atom, and a bonus for unlike atoms: minimum and stress are known."""

    name, version = "springs", "1"
    best = {1: 18.0, 2: 20.0, 3: 22.0}  # Angstrom³ per atom by the number of atoms in the cell

    def _evaluate(self, crystals, derivatives):
        count = crystals["mask"].sum(1)
        volume = torch.linalg.det(crystals["lattice"].double())
        best = torch.tensor([self.best[int(n)] for n in count], dtype=torch.float64)
        strain = (volume / count / best).log()
        energy = strain.square() - 0.3 * (count > 1) - 1e-3 * crystals["numbers"].sum(1) / count
        stress = (2.0 * strain * count / volume)[:, None, None] * torch.eye(3, dtype=torch.float64)
        return energy, torch.zeros_like(crystals["coordinates"].double()), stress if derivatives else None


# ---- candidates -----------------------------------------------------------------------------------------------------


def test_decorations_are_neutral_and_each_crystal_comes_once():
    found = candidates([ROCKSALT, FLUORITE])
    for one in found:
        assert sum(CHARGES[one.species[kind]] for kind in one.prototype.kinds) == 0
    assert len({one.key for one in found}) == len(found)
    salts = [frozenset(one.species) for one in found if one.prototype is ROCKSALT]
    by_hand = {frozenset((a, b)) for a in CHARGES for b in CHARGES if a < b and CHARGES[a] == -CHARGES[b]}
    assert len(salts) == len(set(salts)) and set(salts) == by_hand  # exchanging cation and anion changes nothing
    fluorites = {one.species for one in found if one.prototype is FLUORITE}
    assert ("Ca", "F") in fluorites and ("O", "Li") in fluorites  # here it does: CaF2 and the antifluorite Li2O
    assert ("F", "Ca") not in fluorites


def test_the_order_and_the_shares_are_decided_by_the_key_alone():
    found = candidates([FLUORITE, CAESIUM])
    assert [one.key for one in found] == [one.key for one in candidates([CAESIUM, FLUORITE])]
    assert all(map(shapes.worth_judging, found))  # every binary
    draws = np.array([uniform(f"key {i}") for i in range(20_000)])
    assert abs(draws.mean() - 0.5) < 4.5 / math.sqrt(12 * 20_000) and draws.min() >= 0.0 and draws.max() < 1.0
    for kinds, share in ((3, shapes.SHARE), (4, shapes.SHARE * shapes.QUATERNARY_SHARE)):
        named = [Prototype(f"p{i}", "toy", 1, FCC, (0, 1), PAIR) for i in range(20_000)]
        judged = [shapes.worth_judging(Candidate(p, ("Li", "O", "N", "F")[:kinds], 1.0, shapes.SCALES)) for p in named]
        assert abs(sum(judged) / 20_000 - share) < 4.5 * math.sqrt(share / 20_000)


@pytest.mark.slow  # reading the library of prototypes takes seconds
@pytest.mark.parametrize("order", [(0, 1, 1), (1, 1, 0), (1, 0, 1)])
def test_labels_do_not_depend_on_the_elements_or_the_order_of_the_source(order):
    """The same fluorite as a source may write it: other elements, a supercell, another origin."""
    core = pytest.importorskip("pymatgen.core")
    places = FLUORITE.coordinates[np.argsort(order, kind="stable").argsort()]
    for first, second in (("Ca", "F"), ("O", "Na"), ("Zr", "O")):
        crystal = core.Structure(5.0 * FCC, [first if kind == 0 else second for kind in order], places + 0.3)
        crystal.make_supercell([2, 1, 1])
        found = shapes._prototype(crystal, "toy")
        assert found is not None and found.label == FLUORITE.label and found.space_group == 225
        assert sorted(found.kinds) == [0, 1, 1]


# ---- the scan -------------------------------------------------------------------------------------------------------


def scanned(*group: Candidate):
    return build_proto8._scan(Springs(), group)


def test_the_best_volume_of_a_parabola_is_found_between_the_scales():
    salt = Candidate(ROCKSALT, ("Na", "Cl"), 30.0, shapes.SCALES)
    (row,) = scanned(salt)
    assert row["status"] == "ok" and row["volume"] == pytest.approx(40.0, rel=1e-6)
    of_elements = 1e-3 * (11 + 17) / 2
    assert row["energy"] == pytest.approx(-0.3 - of_elements, abs=1e-7)
    on_grid = min(math.log(30.0 * scale / 40.0) ** 2 for scale in shapes.SCALES)
    assert on_grid > 1e-4  # the grid alone would miss it


def test_a_minimum_at_the_end_and_a_crystal_without_room_are_told_apart():
    outside = Candidate(ROCKSALT, ("Na", "Cl"), 41.0, shapes.SCALES)  # every volume is too large
    crowded = Candidate(ROCKSALT, ("K", "Br"), 2.0, shapes.SCALES)  # atoms within each other
    assert [row["status"] for row in scanned(outside, crowded)] == ["edge", "geometry"]


def test_contacts_of_rock_salt_by_hand():
    ratio, nearest = build_proto8._contacts(
        Candidate(ROCKSALT, ("Na", "Cl"), 1.0, shapes.SCALES).structure(5.64**3 / 4)
    )
    assert nearest == pytest.approx(2.82, rel=1e-9)
    assert ratio == pytest.approx(2.82 / (1.66 + 1.02), rel=1e-6)  # covalent radii of Cordero et al.


def test_a_packed_crystal_is_primitive_ordered_and_the_same():
    matcher = pytest.importorskip("pymatgen.analysis.structure_matcher").StructureMatcher(scale=False)
    crystal = Candidate(FLUORITE, ("Ca", "F"), 1.0, shapes.SCALES).structure(41.0)
    row = build_proto8.packed(crystal * (2, 1, 1))
    assert row is not None and row["numbers"] == [9, 9, 20] and row["space_group"] == 225
    again = build_proto8._unpacked(row)
    assert matcher.fit(again, crystal) and again.volume == pytest.approx(41.0, rel=1e-5)
    assert build_proto8.packed(Candidate(FLUORITE, ("Ca", "F"), 1.0, shapes.SCALES).structure(6.0)) is None


# ---- the whole ------------------------------------------------------------------------------------------------------


@pytest.fixture
def toy_sources(monkeypatch):
    """Three shapes, the elements as one metal, and the springs; the libraries are not read."""
    found = [METAL, ROCKSALT, CAESIUM, FLUORITE]
    wanted = {"Na", "Cl", "Ca", "F"}
    metals = [Candidate(METAL, (symbol,), 18.0, shapes.ELEMENT_SCALES) for symbol in CHARGES]
    monkeypatch.setattr(build_proto8, "prototypes", lambda *_: (found, {"toy": len(found)}))
    monkeypatch.setattr(build_proto8, "candidates", lambda s: [c for c in candidates(s) if set(c.species) <= wanted])
    monkeypatch.setattr(build_proto8, "elementals", lambda *_: metals)
    monkeypatch.setattr(build_proto8, "element_references", lambda _: {})
    monkeypatch.setattr(build_proto8, "CHGNetPotential", Springs)


def made(folder, name: str, archives) -> bytes:
    options = [f"--{source}={path}" for source, path in archives.items()]
    build_proto8.main([f"--out={folder / name}", f"--work={folder / 'work'}", "--steps=6", *options])
    return (folder / name).read_bytes()


def test_the_same_bytes_come_again_and_after_a_break(toy_sources, tmp_path):
    archives = {name: f"/somewhere/{name}-1.0.whl" for name in ("jarvis", "robocrys", "matcalc")}
    first = made(tmp_path, "first.npz", archives)
    for file in (tmp_path / "work").glob("*.jsonl"):
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[: len(lines) // 2]))
    assert made(tmp_path, "again.npz", archives) == first
    table = np.load(tmp_path / "first.npz")
    facts = json.loads(str(table["metadata"]))
    assert facts["sources"]["minerals of JARVIS"] == "jarvis-1.0.whl"  # no folder of this machine
    assert facts["counts"]["kept"] == len(table["n"]) and facts["thresholds"]["FIRE steps"] == 6


def test_the_hull_of_the_springs(toy_sources, tmp_path):
    """Energies of all compounds tie but for 1e-3 of the mean atomic number: the hull's distances are in closed form."""
    made(tmp_path, "set.npz", dict.fromkeys(("jarvis", "robocrys", "matcalc"), "a-1.whl"))
    table = np.load(tmp_path / "set.npz")
    sizes = table["n"].astype(int)
    volumes = np.linalg.det(table["lattice"][:, [[0, 5, 4], [5, 1, 3], [4, 3, 2]]].astype(float)) / sizes
    mean_number = table["numbers"].sum(1) / sizes
    expected = np.log(volumes / np.array([Springs.best[n] for n in sizes])) ** 2 - 0.3 - 1e-3 * mean_number
    np.testing.assert_allclose(table["energy"], expected, atol=1e-6)
    assert float(table["e_above_hull"].max()) < 1e-4  # all at the bottom, and mixtures gain nothing over one compound
    kinds = Counter(tuple(sorted(set(row) - {0})) for row in table["numbers"].tolist())
    assert kinds == {(11, 17): 2, (9, 11): 2, (9, 20): 1, (17, 20): 1}  # both salts twice, no shape of CaNa
    assert sorted(table["elements"].tolist()) == sorted(shapes.atomic_number(symbol) for symbol in CHARGES)


def test_what_matches_a_lower_crystal_is_left_out():
    crystal = Candidate(ROCKSALT, ("Na", "Cl"), 1.0, shapes.SCALES).structure(44.0)
    other = Candidate(CAESIUM, ("Na", "Cl"), 1.0, shapes.SCALES).structure(40.0)
    rows = [build_proto8.packed(one) | {"formula": "NaCl"} for one in (crystal, crystal, other, crystal)]
    energies = (-1.0, -0.995, -0.99, -0.5)
    rows = [row | {"key": str(i), "energy": e} for i, (row, e) in enumerate(zip(rows, energies, strict=True))]
    assert [row["key"] for row in build_proto8._unique(rows)] == ["0", "2", "3"]  # far in energy: not compared
