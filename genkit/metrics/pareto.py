"""Sets of points with several objectives: the non-dominated ones, their hypervolume, thinning, and an archive.

Every objective is maximised. A point dominates another one when it is nowhere smaller and somewhere larger. Rows that
are not finite were not judged (`genkit.rewards.reward_output` marks them with NaN): they are on no front, dominate
nothing and add no volume, wherever they appear.

References: While, Bradstreet, Barone, "A fast way of calculating exact hypervolumes", IEEE Trans. Evol. Comp. 2012
(the recursion over exclusive volumes); Laumanns et al., "Combining convergence and diversity in evolutionary
multiobjective optimization", Evol. Comp. 2002 (ε-boxes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genkit._checks import checked_count
from genkit.errors import ConfigError, nearest

__all__ = ["ParetoArchive", "epsilon_dominance_thinning", "hypervolume", "non_dominated"]

Points = Tensor | NDArray[Any] | Sequence[Sequence[float]]
_Array = NDArray[np.float64]

_BLOCK = 1 << 21  # numbers held at once by the three-dimensional sweep: 16 MB


def non_dominated(points: Points) -> Tensor:
    """Which points no other point dominates.

    Args:
        points: (n, M). Equal points do not dominate each other: all copies are kept, or none.

    Returns:
        bool (n,); False for rows that are not finite.

    Raises:
        ConfigError: another shape than (n, M) with M >= 1.
    """
    return torch.from_numpy(_front(_rows("points", points)))


def hypervolume(points: Points, reference: Sequence[float] | Tensor | NDArray[Any]) -> float:
    """The exact volume of the union of the boxes between ``reference`` and each point, for any number of objectives.

    Points that do not exceed the reference in every objective add nothing. The cost is O(n log n) for two objectives,
    O(n²) for three and at most O(n^(M-1)) beyond.

    Args:
        points: (n, M), n >= 0.
        reference: (M,), finite; compare volumes only where it is the same.

    Raises:
        ConfigError: shapes that do not fit, or a reference that is not finite.
    """
    rows = _rows("points", points)
    gains = rows[np.isfinite(rows).all(axis=1)] - _vector("reference", reference, rows.shape[1])
    gains = gains[(gains > 0.0).all(axis=1)]
    # the staircase of two objectives passes over dominated points by itself
    return _volume(gains[_front(gains)] if gains.shape[1] > 2 else gains)


def epsilon_dominance_thinning(points: Points, epsilon: float | Sequence[float] | Tensor) -> Tensor:
    """A subset of the front with one point in each non-dominated box of a grid with sides ``epsilon``.

    Every finite point p has a kept point q with q + ε >= p in all objectives, every kept point is on the front, and
    two kept points lie in boxes of which neither dominates the other. In a box the point nearest to its upper corner
    stays, of equal ones the first.

    Args:
        points: (n, M).
        epsilon: positive, one number or one an objective (M,).

    Returns:
        bool (n,).

    Raises:
        ConfigError: shapes that do not fit, or an epsilon that is not positive and finite.
    """
    rows = _rows("points", points)
    sides = _sides(epsilon, rows.shape[1])
    candidates = np.flatnonzero(_front(rows))
    boxes = np.floor(rows[candidates] / sides)
    survives = _front(boxes)
    candidates, boxes = candidates[survives], boxes[survives]
    gap = (((boxes + 1.0) - rows[candidates] / sides) ** 2).sum(axis=1)
    order = np.lexsort((candidates, gap))
    _, first = np.unique(boxes[order], axis=0, return_index=True)
    kept = np.zeros(len(rows), dtype=bool)
    kept[candidates[order[first]]] = True
    return torch.from_numpy(kept)


def _rows(name: str, points: Any) -> _Array:
    rows = np.asarray(points.detach().cpu() if isinstance(points, Tensor) else points, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] < 1:
        raise ConfigError(f"{name} has shape {rows.shape}; expected (n, M), one row a point and M >= 1 objectives")
    return rows


def _doubles(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)


def _vector(name: str, value: Any, size: int) -> _Array:
    vector = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value, dtype=np.float64)
    if vector.shape != (size,) or not np.isfinite(vector).all():
        raise ConfigError(f"{name}={vector.tolist()}; expected {size} finite numbers, one an objective")
    return vector


def _sides(epsilon: Any, size: int) -> _Array:
    alone = isinstance(epsilon, (int, float)) and not isinstance(epsilon, bool)
    sides = _vector("epsilon", [epsilon] * size if alone else epsilon, size)
    if not (sides > 0.0).all():
        raise ConfigError(f"epsilon={sides.tolist()}; expected positive sides of the boxes")
    return sides


def _front(rows: _Array) -> NDArray[np.bool_]:
    """Mask of the non-dominated rows. Each pass takes one point and drops all that it dominates."""
    kept = np.flatnonzero(np.isfinite(rows).all(axis=1))
    # large points first: they drop the most. The result does not depend on the order.
    kept = kept[np.argsort(-_ranks(rows[kept]), kind="stable")]
    values, at = rows[kept], 0
    while at < len(values):
        stays = (values > values[at]).any(axis=1) | (values == values[at]).all(axis=1)
        at = int(stays[:at].sum()) + 1
        kept, values = kept[stays], values[stays]
    mask = np.zeros(len(rows), dtype=bool)
    mask[kept] = True
    return mask


def _dominated(rows: _Array, others: _Array) -> NDArray[np.bool_]:
    """Which rows (n, M) one of the others (m, M) dominates; finite numbers."""
    mask = np.zeros(len(rows), dtype=bool)
    block = max(1, _BLOCK // max(1, others.size))
    for start in range(0, len(rows), block):
        part = rows[start : start + block, None]
        below = np.asarray((others >= part).all(axis=2) & (others > part).any(axis=2))
        mask[start : start + block] = below.any(axis=1)
    return mask


def _ranks(rows: _Array) -> _Array:
    """Sums of the scaled objectives: a height that does not depend on their units."""
    if not len(rows):
        return np.zeros(0)
    low, high = rows.min(axis=0), rows.max(axis=0)
    return ((rows - low) / np.where(high > low, high - low, 1.0)).sum(axis=1)


def _volume(gains: _Array) -> float:
    """Volume between 0 and the positive points (n, M); dominated ones may be among them."""
    count, size = gains.shape
    if count == 0:
        return 0.0
    if size == 1:
        return float(gains.max())
    if size == 2:
        return _area(gains)
    return _sweep(gains) if size == 3 else _recursion(gains)


def _area(gains: _Array) -> float:
    ordered = gains[np.argsort(-gains[:, 0])]
    return float(np.maximum.accumulate(ordered[:, 1]) @ _steps(ordered[:, 0]))


def _sweep(gains: _Array) -> float:
    """Three objectives: the areas of all slabs of the third one, as rows of one matrix."""
    ordered = gains[np.argsort(-gains[:, 0])]
    widths, levels = _steps(ordered[:, 0]), np.sort(ordered[:, 2])[::-1]
    depths, total = _steps(levels), 0.0
    rows = max(1, _BLOCK // len(gains))
    for start in range(0, len(levels), rows):
        active = ordered[:, 2] >= levels[start : start + rows, None]
        heights = np.maximum.accumulate(active * ordered[:, 1], axis=1)
        total += float(depths[start : start + rows] @ (heights @ widths))
    return total


def _recursion(gains: _Array) -> float:
    """Sum of exclusive volumes: what each point adds to those that exceed it in the last objective."""
    ordered, total = gains[np.argsort(gains[:, -1])], 0.0
    for i, point in enumerate(ordered):
        # the later points reach higher, so within the box of this one all have its last coordinate
        shared = np.minimum(ordered[i + 1 :, :-1], point[:-1])
        shared = shared[_front(shared)] if shared.shape[1] > 3 else shared
        total += float(point[-1]) * (float(point[:-1].prod()) - _volume(shared))
    return total


def _steps(descending: _Array) -> _Array:
    """Differences of a descending row to its successor, the last one to 0."""
    return descending - np.append(descending[1:], 0.0)


class ParetoArchive:
    """All judged samples of a search with their non-dominated set, which is kept up to date.

    Args:
        num_objectives: M.
        num_parameters: size P of the preference that each sample was drawn for; 0 where there is none.
        reference: (M,), the fixed reference point of the volumes.

    The archive holds numbers; ``ids`` lead to the structures, which the search stores. Samples stay in the order of
    addition, and positions below are indices into it. The front is the same for every order and division of the
    additions.
    """

    _COLUMNS = ("values", "ids", "parameters", "log_weights")

    def __init__(
        self, num_objectives: int, *, num_parameters: int = 0, reference: Sequence[float] | Tensor | None = None
    ) -> None:
        self.num_objectives = checked_count("num_objectives", num_objectives)
        self.num_parameters = checked_count("num_parameters", num_parameters, "an integer, at least 0", 0)
        self.reference = None if reference is None else _vector("reference", reference, self.num_objectives)
        self._chunks: dict[str, list[Tensor]] = {
            "values": [torch.zeros(0, self.num_objectives, dtype=torch.float64)],
            "ids": [torch.zeros(0, dtype=torch.int64)],
            "parameters": [torch.zeros(0, self.num_parameters, dtype=torch.float64)],
            "log_weights": [torch.zeros(0, dtype=torch.float64)],
        }
        self._size = 0
        self._front = np.zeros(0, dtype=np.int64)
        self._front_values = np.zeros((0, self.num_objectives))

    def add(
        self,
        values: Points,
        *,
        ids: Tensor | Sequence[int] | None = None,
        parameters: Points | None = None,
        log_weights: Tensor | Sequence[float] | None = None,
    ) -> Tensor:
        """Adds samples.

        Args:
            values: (B, M); rows that are not finite are stored and counted, never on the front.
            ids: int64 (B,), by default the positions.
            parameters: (B, P), the preferences they were drawn for.
            log_weights: (B,), log importance weights of their paths, by default 0.

        Returns:
            bool (B,), which of them are on the front now.

        Raises:
            ConfigError: shapes that do not fit.
        """
        rows = _rows("values", values)
        new = np.arange(self._size, self._size + len(rows))
        given = {
            "values": torch.from_numpy(rows.copy()),
            "ids": torch.from_numpy(new) if ids is None else torch.as_tensor(ids, dtype=torch.int64),
            "parameters": self._parameters(parameters, len(rows)),
            "log_weights": _doubles(np.zeros(len(rows)) if log_weights is None else log_weights),
        }
        for name, tensor in given.items():
            expected = (len(rows), *self._chunks[name][0].shape[1:])
            if tuple(tensor.shape) != expected:
                raise ConfigError(f"{name} has shape {tuple(tensor.shape)}; expected {expected}, one row a sample")
        for name, tensor in given.items():
            self._chunks[name].append(tensor.detach().cpu().clone())
        self._size += len(rows)
        self._merge(new, rows)
        return torch.from_numpy(np.isin(new, self._front))

    def _parameters(self, parameters: Any, count: int) -> Tensor:
        if parameters is None and self.num_parameters:
            raise ConfigError(f"parameters=None; expected ({count}, {self.num_parameters}), the preference of each row")
        return _doubles(np.zeros((count, 0)) if parameters is None else parameters)

    def _merge(self, positions: NDArray[np.int64], rows: _Array) -> None:
        alone = _front(rows)  # both parts are fronts from here on: only pairs across them remain
        positions, rows = positions[alone], rows[alone]
        new = ~_dominated(rows, self._front_values)
        old = ~_dominated(self._front_values, rows[new])
        self._front = np.concatenate((self._front[old], positions[new]))
        self._front_values = np.concatenate((self._front_values[old], rows[new]))

    def __len__(self) -> int:
        return self._size

    def _column(self, name: str) -> Tensor:
        chunks = self._chunks[name]
        if len(chunks) > 1:
            chunks[:] = [torch.cat(chunks)]
        return chunks[0]

    @property
    def values(self) -> Tensor:
        """Objectives of all samples, float64 (n, M)."""
        return self._column("values")

    @property
    def ids(self) -> Tensor:
        """Identifiers of all samples, int64 (n,)."""
        return self._column("ids")

    @property
    def parameters(self) -> Tensor:
        """Preferences that the samples were drawn for, float64 (n, P)."""
        return self._column("parameters")

    @property
    def log_weights(self) -> Tensor:
        """Log importance weights of the samples' paths, float64 (n,)."""
        return self._column("log_weights")

    @property
    def invalid_count(self) -> int:
        """How many samples have an objective that is not finite."""
        return int((~torch.isfinite(self.values).all(dim=1)).sum())

    @property
    def front(self) -> Tensor:
        """Positions of the non-dominated samples, int64, ascending; copies of a point are all there."""
        return torch.from_numpy(self._front.copy())

    def hypervolume(self, reference: Sequence[float] | Tensor | None = None) -> float:
        """Volume of the front above ``reference`` (M,), by default the archive's own.

        Raises:
            ConfigError: no reference here or in the archive.
        """
        chosen = self.reference if reference is None else reference
        if chosen is None:
            raise ConfigError(
                f"reference=None; expected {self.num_objectives} numbers that every point of interest exceeds: pass "
                "reference= here or to the archive"
            )
        return hypervolume(self._front_values, chosen)

    def thinned(self, epsilon: float | Sequence[float] | Tensor) -> Tensor:
        """Positions of a thinned front (`epsilon_dominance_thinning`), int64, ascending."""
        return self.front[epsilon_dominance_thinning(self._front_values, epsilon)]

    def by_preference(self, preferences: Points | None = None) -> tuple[Tensor, list[Tensor]]:
        """The samples drawn for each preference.

        Args:
            preferences: (K, P); each sample goes to the nearest one, of equally near ones the first. By default the
                different ones among the samples' own, in lexicographic order.

        Returns:
            float64 (K, P), and for each of the K an int64 tensor of positions, ascending (empty where there are none).

        Raises:
            ConfigError: samples without preferences, or shapes that do not fit.
        """
        if not self.num_parameters:
            raise ConfigError("the archive has num_parameters=0; pass num_parameters= and add(..., parameters=)")
        if preferences is None:
            centres, group = torch.unique(self.parameters, dim=0, return_inverse=True)
        else:
            centres = torch.from_numpy(_rows("preferences", preferences).copy())
            if centres.shape[1] != self.num_parameters or not len(centres):
                raise ConfigError(
                    f"preferences has shape {tuple(centres.shape)}; expected (K, {self.num_parameters}), K >= 1"
                )
            group = (self.parameters.unsqueeze(1) - centres).square().sum(dim=2).argmin(dim=1)
        return centres, [torch.nonzero(group == k).flatten() for k in range(len(centres))]

    def state_dict(self) -> dict[str, Tensor]:
        """Everything as plain tensors: the columns and the reference (empty where there is none)."""
        reference = np.zeros(0) if self.reference is None else self.reference
        return {name: self._column(name) for name in self._COLUMNS} | {"reference": torch.from_numpy(reference.copy())}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor | NDArray[Any]]) -> ParetoArchive:
        """The archive that `state_dict` described; tensors or numpy arrays.

        Raises:
            ConfigError: a column that is missing, unknown or of another shape.
        """
        expected = (*cls._COLUMNS, "reference")
        for name in sorted({*expected} ^ {*state}):
            what = "is missing" if name in expected else "is unknown"
            raise ConfigError(f"state entry {name!r} {what}; expected {', '.join(expected)}.{nearest(name, state)}")
        columns = {name: torch.as_tensor(value) for name, value in state.items()}
        values, parameters, reference = columns["values"], columns["parameters"], columns.pop("reference")
        if values.ndim != 2 or parameters.ndim != 2:
            raise ConfigError(
                f"values has shape {tuple(values.shape)} and parameters {tuple(parameters.shape)}; expected (n, M) "
                "and (n, P)"
            )
        archive = cls(
            values.shape[1], num_parameters=parameters.shape[1], reference=reference if reference.numel() else None
        )
        archive.add(values, ids=columns["ids"], parameters=parameters, log_weights=columns["log_weights"])
        return archive
