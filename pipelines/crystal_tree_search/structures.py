"""Crystals as tensors, and as the objects of pymatgen and ASE, CIF text and extxyz files under the same ids.

A batch of crystals ("crystals") is a dict of tensors, batch first: ``lattice`` (B, 3, 3) rows = lattice vectors in
Angstrom, ``coordinates`` (B, N, 3) fractional, ``numbers`` (B, N) atomic numbers with 0 at padding, ``mask`` (B, N)
with the atoms first. A lattice is stored as the symmetric positive definite S of its polar decomposition L = S Q
(Q a rotation): S depends on lengths and angles alone, so two files that differ by a rotation give the same tensors.
"""

from __future__ import annotations

import importlib
import io
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genkit.errors import ConfigError, MissingExtraError

__all__ = [
    "Crystals",
    "check_crystals",
    "cif_text",
    "concatenate",
    "formula_key",
    "formula_keys",
    "from_atoms",
    "from_structures",
    "optional_module",
    "polar_lattice",
    "read_cifs",
    "read_extxyz",
    "take",
    "to_atoms",
    "to_structures",
    "write_cifs",
    "write_extxyz",
]

Crystals = dict[str, Tensor]

#: CIF files are named after ids, so these may hold nothing that a file name cannot.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}")


def optional_module(name: str, extra: str = "crystals") -> Any:
    """The module ``name``, or an error that names the extra which installs it.

    Raises:
        MissingExtraError: the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"{name.split('.')[0]} is not installed (or broken: {error}); "
            f'pip install "genkit-diffusion[{extra}]" installs it'
        ) from error


def check_crystals(crystals: Any) -> tuple[int, int]:
    """(B, N) of a batch of crystals.

    Raises:
        ConfigError: a field is missing, or has another shape or kind.
    """
    fields = ("lattice", "coordinates", "numbers", "mask")
    if not isinstance(crystals, Mapping) or any(not isinstance(crystals.get(name), Tensor) for name in fields):
        found = sorted(crystals) if isinstance(crystals, Mapping) else f"type {type(crystals).__name__}"
        raise ConfigError(f"crystals are {found}; expected a dict of the tensors {', '.join(fields)}")
    numbers = crystals["numbers"]
    if numbers.ndim != 2 or numbers.is_floating_point():
        raise ConfigError(f"numbers have shape {tuple(numbers.shape)} and {numbers.dtype}; expected (B, N) integers")
    size, atoms = numbers.shape
    shapes = {"lattice": (size, 3, 3), "coordinates": (size, atoms, 3), "mask": (size, atoms)}
    for name, shape in shapes.items():
        if tuple(crystals[name].shape) != shape:
            raise ConfigError(
                f"{name} has shape {tuple(crystals[name].shape)}; expected {shape}, as numbers are {(size, atoms)}"
            )
    return size, atoms


def take(crystals: Mapping[str, Tensor], index: Tensor | slice) -> Crystals:
    """The rows ``index`` (integers, a mask or a slice) of every field."""
    return {name: crystals[name][index] for name in ("lattice", "coordinates", "numbers", "mask")}


def formula_key(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """The reduced formula of atomic numbers (zeros are padding): (number, least whole amount) in order; () of none."""
    counts: dict[int, int] = {}
    for number in numbers:
        if number:
            counts[number] = counts.get(number, 0) + 1
    divisor = math.gcd(*counts.values()) if counts else 1
    return tuple(sorted((number, amount // divisor) for number, amount in counts.items()))


def formula_keys(crystals: Mapping[str, Tensor]) -> list[tuple[tuple[int, int], ...]]:
    """:func:`formula_key` of every row."""
    return [formula_key(row) for row in (crystals["numbers"] * crystals["mask"]).tolist()]


def concatenate(parts: Sequence[Mapping[str, Tensor]]) -> Crystals:
    """Batches one after the other, padded to the widest."""
    width = max((check_crystals(part)[1] for part in parts), default=0)
    if not parts:
        raise ConfigError("nothing to concatenate; expected at least one batch of crystals")
    padded = [_pad(part, width) for part in parts]
    return {name: torch.cat([part[name] for part in padded]) for name in padded[0]}


def _pad(part: Mapping[str, Tensor], width: int) -> Crystals:
    missing = width - part["numbers"].shape[1]
    return {
        "lattice": part["lattice"],
        "coordinates": torch.nn.functional.pad(part["coordinates"], (0, 0, 0, missing)),
        "numbers": torch.nn.functional.pad(part["numbers"], (0, missing)),
        "mask": torch.nn.functional.pad(part["mask"], (0, missing)),
    }


# --- the polar form ---------------------------------------------------------------------------------------------------


def polar_lattice(lattice: Tensor, coordinates: Tensor) -> tuple[Tensor, Tensor]:
    """S (B, 3, 3) of L = S Q and the coordinates that go with it.

    Q shall be a rotation, no mirror: where det L < 0 the three vectors and the coordinates change their sign first,
    which leaves every position as it is. Otherwise a right-handed quartz would come out left-handed.

    Args:
        lattice: (B, 3, 3), rows are lattice vectors.
        coordinates: (B, N, 3) fractional.
    """
    rows = lattice.double()
    coordinates = torch.where((torch.linalg.det(rows) < 0)[:, None, None], -coordinates, coordinates)
    squares, vectors = torch.linalg.eigh(rows @ rows.mT)
    polar = vectors * squares.clamp_min(0).sqrt().unsqueeze(-2) @ vectors.mT
    return ((polar + polar.mT) / 2).to(lattice.dtype), coordinates


def _wrapped(coordinates: Tensor) -> Tensor:
    # a tiny negative number mod 1 rounds to 1, which is outside [0, 1)
    wrapped = coordinates.remainder(1.0)
    return torch.where(wrapped >= 1.0, torch.zeros_like(wrapped), wrapped)


def _batch(cells: Sequence[tuple[np.ndarray, np.ndarray, Sequence[int]]], max_atoms: int | None) -> Crystals:
    """(lattice (3, 3), coordinates (n, 3), numbers (n,)) of each crystal, padded and in polar form."""
    sizes = [len(numbers) for *_, numbers in cells]
    width = max(sizes, default=0) if max_atoms is None else max_atoms
    if sizes and max(sizes) > width:
        raise ConfigError(
            f"structure {int(np.argmax(sizes))} has {max(sizes)} atoms; expected at most max_atoms={width}"
        )
    coordinates = torch.zeros(len(cells), width, 3, dtype=torch.float64)
    numbers = torch.zeros(len(cells), width, dtype=torch.int64)
    for row, (_, positions, kinds) in enumerate(cells):
        coordinates[row, : len(kinds)] = torch.as_tensor(np.array(positions, dtype=np.float64).reshape(-1, 3))
        numbers[row, : len(kinds)] = torch.as_tensor(list(kinds), dtype=torch.int64)
    lattice = torch.as_tensor(np.array([cell for cell, *_ in cells], dtype=np.float64).reshape(-1, 3, 3))
    lattice, coordinates = polar_lattice(lattice, coordinates)
    mask = torch.arange(width)[None] < torch.tensor(sizes, dtype=torch.int64)[:, None]
    kept = _wrapped(coordinates.float()) * mask.unsqueeze(-1)
    return {"lattice": lattice.float(), "coordinates": kept, "numbers": numbers, "mask": mask}


# --- pymatgen and ASE -------------------------------------------------------------------------------------------------


def from_structures(structures: Sequence[Any], max_atoms: int | None = None) -> Crystals:
    """Ordered pymatgen structures as tensors.

    Args:
        structures: ``pymatgen.core.Structure`` objects.
        max_atoms: N; None: the largest number of atoms.

    Raises:
        ConfigError: a structure has more atoms, or a site that several species share.
    """
    for index, structure in enumerate(structures):
        if not structure.is_ordered:
            raise ConfigError(f"structure {index} ({structure.formula}) is disordered; expected one element a site")
    cells = [(s.lattice.matrix, s.frac_coords, [site.specie.Z for site in s]) for s in structures]
    return _batch(cells, max_atoms)


def from_atoms(atoms: Sequence[Any], max_atoms: int | None = None) -> Crystals:
    """``ase.Atoms`` objects as tensors; see :func:`from_structures`.

    Raises:
        ConfigError: more atoms than ``max_atoms``, or a cell that is not periodic in three directions.
    """
    for index, one in enumerate(atoms):
        if one.cell.rank < 3:
            raise ConfigError(f"structure {index} ({one.symbols}) has no three-dimensional cell; expected a crystal")
    return _batch([(a.cell.array, a.get_scaled_positions(wrap=False), a.numbers.tolist()) for a in atoms], max_atoms)


def to_structures(crystals: Mapping[str, Tensor], *, skip: bool = False) -> list[Any]:
    """``pymatgen.core.Structure`` objects.

    Args:
        crystals: B of them.
        skip: None in the place of a crystal that cannot be one (not finite, a singular cell, an unknown element).

    Raises:
        ConfigError: without ``skip``, for such a crystal.
        MissingExtraError: pymatgen is not installed.
    """
    core = optional_module("pymatgen.core")
    return [
        None if cell is None else core.Structure(core.Lattice(cell[0]), cell[2], cell[1])
        for cell in _cells(crystals, skip)
    ]


def to_atoms(crystals: Mapping[str, Tensor], *, skip: bool = False) -> list[Any]:
    """``ase.Atoms`` objects, periodic; arguments and errors as in :func:`to_structures`."""
    ase = optional_module("ase")
    return [
        None if cell is None else ase.Atoms(cell[2], scaled_positions=cell[1], cell=cell[0], pbc=True)
        for cell in _cells(crystals, skip)
    ]


def _cells(crystals: Mapping[str, Tensor], skip: bool) -> list[tuple[np.ndarray, np.ndarray, list[int]] | None]:
    check_crystals(crystals)
    fields = {name: crystals[name].detach().cpu() for name in ("lattice", "coordinates", "numbers", "mask")}
    lattices, coordinates = fields["lattice"].double().numpy(), fields["coordinates"].double().numpy()
    cells: list[tuple[np.ndarray, np.ndarray, list[int]] | None] = []
    for row, kept in enumerate(fields["mask"].bool().numpy()):
        cell = lattices[row], coordinates[row][kept], fields["numbers"][row].numpy()[kept].tolist()
        problem = _problem(*cell)
        if problem and not skip:
            raise ConfigError(f"crystal {row} {problem}; drop it by its validity mask, or pass skip=True for None")
        cells.append(None if problem else cell)
    return cells


def _problem(lattice: np.ndarray, coordinates: np.ndarray, numbers: list[int]) -> str:
    if not (np.isfinite(lattice).all() and np.isfinite(coordinates).all()):
        return "is not finite"
    if not numbers or min(numbers) < 1 or max(numbers) > 118:
        return f"has atomic numbers {numbers}, expected at least one, from 1 to 118"
    volume = abs(np.linalg.det(lattice))
    # the double comparison also refuses flat cells of large vectors
    if volume < 1e-6 or volume < 1e-9 * np.linalg.norm(lattice, axis=1).prod():
        return f"has a singular cell (volume {volume:.1e} A^3)"
    return ""


# --- files ------------------------------------------------------------------------------------------------------------


def cif_text(structure: Any, name: str = "") -> str:
    """CIF text of a pymatgen structure in P1, as its atoms stand; ``name`` names the data block."""
    text = str(optional_module("pymatgen.io.cif").CifWriter(structure))
    return re.sub(r"^data_\S*", f"data_{name}", text, count=1, flags=re.MULTILINE) if name else text


def write_cifs(
    folder: str | os.PathLike[str], crystals: Mapping[str, Tensor], ids: Sequence[Any], *, overwrite: bool = False
) -> list[Path]:
    """``<folder>/<id>.cif`` of every crystal; the data block carries the id too.

    Raises:
        ConfigError: ids that are not unique, cannot name a file, or whose file exists.
    """
    names = _checked_ids(ids, check_crystals(crystals)[0])
    paths = [Path(folder) / f"{name}.cif" for name in names]
    for path in paths:
        _check_absent(path, overwrite)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path, name, structure in zip(paths, names, to_structures(crystals), strict=True):
        _write_whole(path, cif_text(structure, name))
    return paths


def read_cifs(folder: str | os.PathLike[str], max_atoms: int | None = None) -> tuple[Crystals, list[str]]:
    """Crystals and ids of the ``*.cif`` of a folder, in the order of the names (numbers by their size).

    Raises:
        ConfigError: no such file, or one that cannot be read.
    """
    paths = sorted(Path(folder).glob("*.cif"), key=lambda path: (len(path.stem), path.stem))
    if not paths:
        raise ConfigError(f"{folder} holds no *.cif; expected a folder that write_cifs made")
    return from_structures([_read_cif(path) for path in paths], max_atoms), [path.stem for path in paths]


def _read_cif(path: Path) -> Any:
    core = optional_module("pymatgen.core")
    try:
        return core.Structure.from_str(path.read_text(encoding="utf-8"), fmt="cif", primitive=False)
    except (ValueError, KeyError, IndexError, AssertionError) as error:
        raise ConfigError(f"{path} is no CIF that pymatgen can read ({error}); repair or remove the file") from error


def write_extxyz(
    path: str | os.PathLike[str],
    crystals: Mapping[str, Tensor],
    ids: Sequence[Any],
    properties: Mapping[str, Sequence[Any] | Tensor] | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """One extxyz file with every crystal, its ``id`` and its scalar properties in the comment line.

    Args:
        path: the file.
        crystals: B of them.
        ids: B unique ids, say the numbers of the leaves.
        properties: name → B numbers or texts.
        overwrite: replace an existing file.

    Raises:
        ConfigError: ids that are not unique, a property of another length, or a file that exists.
        OSError: the disk is full or read-only; an older file is kept as it was.
    """
    size, target = check_crystals(crystals)[0], Path(path)
    names, columns = _checked_ids(ids, size), dict(properties or {})
    for key, column in columns.items():
        if len(column) != size:
            raise ConfigError(f"property {key!r} has {len(column)} values; expected {size}, one a crystal")
    _check_absent(target, overwrite)
    images = to_atoms(crystals)
    for row, image in enumerate(images):
        image.info = {"id": names[row], **{key: _plain(column[row]) for key, column in columns.items()}}
    target.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    optional_module("ase.io").write(text, images, format="extxyz")
    _write_whole(target, text.getvalue())
    return target


def read_extxyz(
    path: str | os.PathLike[str], max_atoms: int | None = None
) -> tuple[Crystals, list[str], dict[str, list[Any]]]:
    """Crystals, ids (``id`` of the comment line, else the position) and the other entries of the comment lines.

    An entry that only some crystals have is None for the others.

    Raises:
        ConfigError: a file that cannot be read.
    """
    try:
        images = optional_module("ase.io").read(path, index=":", format="extxyz")
    except (OSError, ValueError, KeyError, IndexError, StopIteration, RuntimeError) as error:
        raise ConfigError(f"{path} cannot be read as extxyz ({type(error).__name__}: {error})") from error
    if not images:
        raise ConfigError(f"{path} holds no structure")
    ids = [str(image.info.get("id", row)) for row, image in enumerate(images)]
    keys = sorted({key for image in images for key in image.info} - {"id"})
    return from_atoms(images, max_atoms), ids, {key: [image.info.get(key) for image in images] for key in keys}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor | np.generic) else value


def _checked_ids(ids: Sequence[Any], size: int) -> list[str]:
    names = [str(_plain(one)) for one in ids]
    if len(names) != size or len(set(names)) != size:
        raise ConfigError(f"{len(names)} ids, {len(set(names))} different; expected {size} unique ones, one a crystal")
    for name in names:
        if not _ID.fullmatch(name):
            raise ConfigError(f"id {name!r} cannot name a file; expected letters, digits and _ . + -")
    return names


def _check_absent(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists; pass overwrite=True to replace it, or another path")


def _write_whole(path: Path, text: str) -> None:
    """All of the text or, where the disk is full, an OSError and what stood under that name before."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
