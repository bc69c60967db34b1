"""The hull by hand, by two solvers, and from files that are not what they should be."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from genkit.errors import ConfigError
from genkit.pipelines.crystal_tree_search.hull import Hull, HullEntry, as_hull, element_symbols
from genkit.pipelines.crystal_tree_search.potentials import BatchedPotential
from genkit.pipelines.crystal_tree_search.rewards import StabilityReward
from genkit.pipelines.crystal_tree_search.structures import from_structures, write_extxyz

LI2O = {"numbers": [[3, 0, 0], [8, 0, 0], [3, 3, 8]], "energies": [-1.9, -4.95, -4.76]}


def crystals(*rows: list[int]) -> dict[str, Tensor]:
    width = max(len(row) for row in rows)
    numbers = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return {
        "lattice": torch.eye(3).expand(len(rows), 3, 3),
        "coordinates": torch.zeros(*numbers.shape, 3),
        "numbers": numbers,
        "mask": numbers > 0,
    }


def above(hull: Hull, numbers: list[int], energy: float) -> float:
    return float(hull.energy_above_hull(crystals(numbers), torch.tensor([energy], dtype=torch.float64)).values)


@pytest.mark.parametrize("method", ["phase_diagram", "linear_program"])
def test_lithium_oxides_by_hand(method: str) -> None:
    hull = Hull.from_arrays(**LI2O, method=method)
    # LiO = 3/4 Li2O + 1/4 O, per atom
    assert above(hull, [3, 8], -3.9) == pytest.approx(0.75 * 4.76 + 0.25 * 4.95 - 3.9, abs=1e-12) == 0.9075
    assert above(hull, [3, 3, 8], -4.76) == pytest.approx(0.0, abs=1e-12)
    assert above(hull, [3, 8, 3], -5.0) == pytest.approx(-0.24, abs=1e-12)  # below every mixture
    assert above(hull, [3, 3, 3, 8], -4.0) == pytest.approx(0.75 * 4.76 + 0.25 * 1.9 - 4.0, abs=1e-12)
    assert above(hull, [8, 8], -4.9) == pytest.approx(0.05, abs=1e-12)
    assert above(hull.elemental(), [3, 8], -3.9) == pytest.approx((1.9 + 4.95) / 2 - 3.9, abs=1e-12)


def test_both_methods_agree_over_random_quaternaries() -> None:
    random = np.random.default_rng(0)
    elements = [3, 11, 8, 9]
    rows, energies = [[e] + [0] * 7 for e in elements], list(random.normal(size=4))
    for _ in range(60):
        rows.append(random.choice(elements, 8).tolist())
        energies.append(float(random.normal() - 1))
    batch, zeros = crystals(*(row for row in rows)), torch.zeros(64, dtype=torch.float64)
    found = [
        Hull.from_arrays(rows, energies, method=method).energy_above_hull(batch, zeros).values
        for method in ("phase_diagram", "linear_program")
    ]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-10)
    own = Hull.from_arrays(rows, energies).energy_above_hull(batch, torch.tensor(energies, dtype=torch.float64)).values
    assert (own > -1e-10).all() and (own < 1e-10).sum() >= 4  # entries are on or above their own hull


def test_distances_are_those_of_pymatgen() -> None:
    """Random systems of two to four elements: its own entries, and candidates far above and far below the hull."""
    from pymatgen.analysis.phase_diagram import PDEntry, PhaseDiagram
    from pymatgen.core import Composition, Element

    random = np.random.default_rng(1)
    for size in (2, 3, 4):
        elements = random.choice([3, 8, 9, 11, 17, 22, 38], size, replace=False).tolist()
        rows = [[one] for one in elements] + [random.choice(elements, 6).tolist() for _ in range(15)]
        energies = [float(value) for value in random.normal(-2, 1, len(rows))]
        asked = [random.choice(elements, int(random.integers(1, 7))).tolist() for _ in range(12)]
        values = torch.tensor(random.normal(-2, 3, 12))

        def composition(row: list[int]) -> Composition:
            return Composition({Element.from_Z(z).symbol: row.count(z) for z in row})

        diagram = PhaseDiagram(
            [PDEntry(composition(row), energy * len(row)) for row, energy in zip(rows, energies, strict=True)]
        )
        hull = Hull.from_arrays([row + [0] * (6 - len(row)) for row in rows], energies)
        found = hull.energy_above_hull(crystals(*asked), values).values
        for place, row in enumerate(asked):
            judged = PDEntry(composition(row), float(values[place]) * len(row))
            expected = diagram.get_decomp_and_e_above_hull(judged, allow_negative=True)[1]
            assert float(found[place]) == pytest.approx(expected, abs=1e-9)


def test_a_missing_element_is_unknown_and_counted_never_stable() -> None:
    hull = Hull.from_arrays([[3, 0], [3, 8]], [-1.9, -4.0])  # LiO, but no oxygen
    found = hull.energy_above_hull(crystals([3, 8], [3, 3], [8, 26]), torch.tensor([-9.0, -1.0, -9.0]))
    assert found.values.isnan().tolist() == [True, False, True]
    assert found.known.tolist() == [False, True, False]
    assert found.missing == {8: 2, 26: 1}
    assert not (found.values <= 0.1)[[0, 2]].any()
    nan = hull.energy_above_hull(crystals([3, 3]), torch.tensor([math.nan]))
    assert nan.values.isnan().all() and nan.known.all()


def test_entries_of_one_id_are_all_kept() -> None:
    """pymatgen forgets unstable entries that share an id."""
    hull = Hull.from_arrays(**LI2O, ids=["mp-1", "mp-1", "mp-1"])
    assert [entry.entry_id for entry in hull.entries] == ["mp-1", "mp-1#2", "mp-1#3"]
    assert above(hull, [3, 8], -3.9) == pytest.approx(0.9075)


def test_multiples_of_a_formula_share_one_hull_energy() -> None:
    hull = Hull.from_arrays(**LI2O)
    assert above(hull, [3, 8], -3.9) == above(hull, [3, 8, 8, 3, 8, 3], -3.9)
    assert len(hull._energies) == 1 and len(hull._diagrams) == 1


def test_a_self_consistent_hull_leaves_out_what_has_no_energy() -> None:
    batch = crystals([3], [8], [3, 3, 8], [3, 8])
    hull = Hull.from_crystals(batch, torch.tensor([-1.9, -4.95, -4.76, math.nan], dtype=torch.float64))
    assert hull.name == "self" and len(hull) == 3
    assert above(hull, [3, 8], -3.9) == pytest.approx(0.9075)


def test_files_of_entries(tmp_path: Path) -> None:
    rows = [
        {"formula": "Li", "energy_per_atom": -1.9},
        {"composition": {"O": 2}, "energy": -10.0, "correction": 0.1, "entry_id": "oxygen"},
        {"composition": {"Li": 2, "O": 1}, "energy": 3 * -4.76, "id": "mp-1960"},
    ]
    plain, packed = tmp_path / "hull.json", tmp_path / "hull.json.gz"
    plain.write_text(json.dumps({"entries": rows}))
    packed.write_bytes(gzip.compress(json.dumps(rows).encode()))
    for path in (plain, packed):
        hull = as_hull(path)
        assert above(hull, [3, 8], -3.9) == pytest.approx(0.9075) and hull.name == path.name
        assert "mp-1960" in {entry.entry_id for entry in hull.entries}


def test_extxyz_entries(tmp_path: Path) -> None:
    from pymatgen.core import Lattice, Structure

    cells = [
        Structure(Lattice.cubic(4), kinds, np.eye(3)[: len(kinds)] * 0.4) for kinds in (["Li"], ["O"], ["Li", "O"])
    ]
    path = write_extxyz(tmp_path / "h.extxyz", from_structures(cells), "abc", {"energy_per_atom": [-1.9, -4.95, -5.0]})
    assert above(Hull.from_file(path), [3, 8], -3.9) == pytest.approx(1.1)
    write_extxyz(tmp_path / "e.extxyz", from_structures(cells), "abc", {"energy": [-1.9, -4.95, -10.0]})
    assert above(Hull.from_file(tmp_path / "e.extxyz"), [3, 8], -3.9) == pytest.approx(1.1)
    write_extxyz(tmp_path / "none.extxyz", from_structures(cells), "abc")
    with pytest.raises(ConfigError, match="no energy"):
        Hull.from_file(tmp_path / "none.extxyz")


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "reference.json.gz"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123456\n")
    with pytest.raises(ConfigError, match="git lfs pull"):
        Hull.from_file(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"[{", "damaged"),
        (b"\xff\xfe\x00", "damaged"),
        (b"{}", "no list of entries"),
        (b"[]", "no list of entries"),
        (b"[3]", "entry 0 is a int"),
        (b'[{"energy": 1}]', "expected a composition"),
        (b'[{"formula": "Li", "energy_per_atom": NaN}]', "in the place of a finite number"),
        (b'[{"formula": "Li"}]', "in the place of a finite number"),
        (b'[{"composition": {"Lj": 1}, "energy": 1}]', "'Lj' is not known"),
    ],
)
def test_damaged_files_say_what_is_wrong(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "hull.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Hull.from_file(path)


def test_a_truncated_archive_and_a_missing_file(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps([{"formula": "Li", "energy_per_atom": -1.9}] * 50).encode())
    (tmp_path / "cut.json.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="damaged"):
        Hull.from_file(tmp_path / "cut.json.gz")
    with pytest.raises(ConfigError, match="cannot be read"):
        Hull.from_file(tmp_path / "nothing.json")


def test_objects_with_arrays_are_hulls() -> None:
    ready = SimpleNamespace(numbers=[[3, 3, 8]], energies=[-4.76], elements={"Li": -1.9, 8: -4.95})
    for source in (ready, vars(ready), Hull.from_arrays(**LI2O), list(Hull.from_arrays(**LI2O).entries)):
        assert above(as_hull(source), [3, 8], -3.9) == pytest.approx(0.9075)
    with pytest.raises(ConfigError, match="expected a Hull"):
        as_hull(3.0)


def test_bad_entries_are_refused() -> None:
    with pytest.raises(ConfigError, match="no entry"):
        Hull([])
    with pytest.raises(ConfigError, match="energy nan"):
        Hull([HullEntry(((3, 1.0),), math.nan)])
    with pytest.raises(ConfigError, match="Did you mean 'linear_program'"):
        Hull.from_arrays(**LI2O, method="linear_programm")
    with pytest.raises(ConfigError, match="expected"):
        Hull.from_arrays([[3]], [1.0, 2.0])
    assert element_symbols()[1] == "H" and element_symbols()[92] == "U"


def test_a_table_of_entries(tmp_path: Path) -> None:
    path = tmp_path / "hull.csv"
    path.write_text("id,formula,energy_per_atom,energy\na,Li,-1.9,\nb,O2,,-9.9\nc,Li2O,-4.76,\n")
    assert above(as_hull(path), [3, 8], -3.9) == pytest.approx(0.9075)
    assert {entry.entry_id for entry in as_hull(path).entries} == {"a", "b", "c"}
    wrong = {
        "id,formula\n": "no row below",
        "formula,energy\nLi,low\n": "line 2: 'low' in the place of a finite number",
        "formula,energy\nLi,-1\nO,nan\n": "line 3: nan in the place of a finite number",
        "energy\n-1\n": "expected a composition or a formula",
        'formula,energy\n"Li,-1\n': "is damaged",
        "formula,energy\nLj,-1\n": "Lj",
    }
    for text, message in wrong.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            as_hull(path)
    (tmp_path / "hull.txt").write_text("Li -1.9")
    with pytest.raises(ConfigError, match="another ending"):
        as_hull(tmp_path / "hull.txt")


class Counting(BatchedPotential):
    """-1 eV for each kind of atom in a crystal; neon raises."""

    name, version = "counting", "2"

    def _evaluate(self, crystals: dict[str, Tensor], derivatives: bool) -> tuple[Tensor, None, None]:
        if (crystals["numbers"] == 10).any():
            raise ValueError("no neon")
        kinds = [len(set(row.tolist()) - {0}) for row in crystals["numbers"]]
        return -torch.tensor(kinds, dtype=torch.float64), None, None


def test_the_self_consistent_hull_is_of_one_potential_and_refuses_another() -> None:
    batch = {**crystals([3], [8], [3, 8], [10]), "lattice": 4 * torch.eye(3).expand(4, 3, 3)}
    hull = Hull.from_potential(batch, Counting(), ["a", "b", "c", "d"])
    assert [entry.entry_id for entry in hull.entries] == ["a", "b", "c"] and hull.potential == "counting 2"
    assert above(hull, [3, 3, 8], -1.0) == pytest.approx(2 / 3)  # a third of Li and two thirds of LiO
    hull.check_potential(Counting())
    other = Counting()
    other.version = "3"
    for one in (hull, hull.elemental()):
        with pytest.raises(ConfigError, match="of counting 2 and the energies are of counting 3"):
            one.check_potential(other)
    with pytest.raises(ConfigError, match="different zeros"):
        StabilityReward(other, hull)
    StabilityReward(other, Hull.from_arrays(**LI2O))  # of nobody knows what: taken at its word


def test_the_shipped_hull_is_called_self(monkeypatch: pytest.MonkeyPatch) -> None:
    from genkit.pipelines.crystal_tree_search import proto8

    found = proto8.Proto8Hull({3: -1.9, 8: -4.95}, torch.tensor(LI2O["numbers"][2:]), torch.tensor([-4.76]).double())
    monkeypatch.setattr(proto8, "load_hull", lambda: found)
    hull = as_hull("self")
    assert above(hull, [3, 8], -3.9) == pytest.approx(0.9075) and hull.potential == "CHGNet 0.3.0"
    with pytest.raises(ConfigError, match="different zeros"):
        hull.check_potential(Counting())

    def broken() -> None:
        raise FileNotFoundError("proto8.npz")

    monkeypatch.setattr(proto8, "load_hull", broken)
    with pytest.raises(ConfigError, match="install genkit again"):
        as_hull("self")
