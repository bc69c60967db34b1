"""Pictures of a search: its tree, the rewards it finds, fronts of two objectives, crystals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genkit._checks import checked_count
from genkit.errors import ConfigError
from genkit.metrics.pareto import non_dominated
from genkit.pipelines.crystal_tree_search.hull import element_symbols
from genkit.pipelines.crystal_tree_search.proto8 import reduced_formula
from genkit.plotting import COLOURS
from genkit.samplers.tree.result import TreeResult
from genkit.samplers.tree.store import NodeStore

__all__ = ["draw_crystals", "draw_fronts", "draw_rewards", "draw_tree", "interactive_front", "interactive_tree"]

_CYCLE = tuple(colour for name, colour in COLOURS.items() if name != "data")
_EDGES = tuple((a, b) for a in range(8) for b in range(a) if bin(a ^ b).count("1") == 1)  # of a cube of 3-bit corners
_VIEW = np.array([[0.94, 0.34, 0.0], [-0.12, 0.33, 0.94], [0.32, -0.88, 0.35]])  # rows: right, up, towards the viewer


# ---- trees -----------------------------------------------------------------------------------------------------------


def _layout(result: TreeResult, tree: int, most: int) -> dict[str, np.ndarray]:
    """Nodes that are drawn (the paths to the best leaves, ``most`` nodes), their places, parents, values and visits.

    x is the middle of a node's children in depth-first order, y the depth, downwards.
    """
    store = result.store
    if not 0 <= tree < store.trees:
        raise ConfigError(f"tree={tree}; expected 0 to {store.trees - 1}")
    kept = _best_paths(store, tree, result.policy.leaf_depth, checked_count("max_nodes", most))
    place: dict[int, float] = {}
    free = 0.0
    stack = [(tree, False)]
    while stack:
        node, ready = stack.pop()
        below = [int(child) for child in store.children(np.array([node]))[0] if int(child) in kept]
        if below and not ready:
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(below))
        elif below:
            place[node] = 0.5 * (place[below[0]] + place[below[-1]])
        else:
            place[node], free = free, free + 1.0
    nodes = np.array(sorted(place))
    width = max(free - 1.0, 1.0)
    return {
        "node": nodes,
        "x": np.array([place[int(n)] for n in nodes]) / width,
        "y": -store.depth[nodes].astype(float),
        "parent": np.searchsorted(nodes, store.parent[nodes]) * (nodes != tree) - (nodes == tree),
        "value": store.values[nodes, 0],
        "visits": store.visits[nodes].astype(np.int64),
    }


def _best_paths(store: NodeStore, tree: int, leaf_depth: int, most: int) -> set[int]:
    """The root, and the nodes on the paths to the leaves of highest value that fit into ``most`` nodes."""
    leaves = np.flatnonzero(
        (store.tree[: store.size] == tree)
        & (store.visits[: store.size] > 0)
        & (store.depth[: store.size] == leaf_depth)
    )
    kept = {tree}
    for leaf in leaves[np.argsort(-store.values[leaves, 0], kind="stable")].tolist():
        path = [leaf]
        while store.parent[path[-1]] >= 0:
            path.append(int(store.parent[path[-1]]))
        if len(kept | set(path)) > most:
            break
        kept |= set(path)
    return kept


def draw_tree(result: TreeResult, *, tree: int = 0, max_nodes: int = 400) -> Any:
    """A tree from the root down: lines are macro-edges, colour is the soft value, size the visits.

    Args:
        result: of a search.
        tree: which one.
        max_nodes: the paths to the best leaves are drawn, as many as fit.

    Raises:
        ConfigError: no such tree.
    """
    import matplotlib.pyplot as plt
    from matplotlib.collections import LineCollection

    spots = _layout(result, tree, max_nodes)
    figure, axis = plt.subplots(figsize=(8.0, 4.5))
    child = np.flatnonzero(spots["parent"] >= 0)
    ends = np.stack([np.stack((spots["x"], spots["y"]), 1)[index] for index in (spots["parent"][child], child)], axis=1)
    axis.add_collection(LineCollection(list(ends), colors="0.75", linewidths=0.5, zorder=1))
    finite = np.isfinite(spots["value"])
    size = 4.0 + 40.0 * np.sqrt(spots["visits"] / spots["visits"].max())
    drawn = axis.scatter(
        spots["x"][finite], spots["y"][finite], s=size[finite], c=spots["value"][finite], cmap="viridis", zorder=2
    )
    axis.scatter(spots["x"][~finite], spots["y"][~finite], s=size[~finite], c="0.8", zorder=2)
    figure.colorbar(drawn, ax=axis, label="soft value")
    depths = range(result.policy.leaf_depth + 1)
    axis.set_yticks([-depth for depth in depths], ["root", *(str(d) for d in depths[1:-1]), "leaf"])
    axis.set_xticks([])
    axis.grid(False)
    axis.set_ylabel("level")
    return figure


def interactive_tree(result: TreeResult, *, tree: int = 0, max_nodes: int = 400) -> Any:
    """The same as a plotly figure: pointing at a node shows its value, visits and number."""
    import plotly.graph_objects as go

    spots = _layout(result, tree, max_nodes)
    child = np.flatnonzero(spots["parent"] >= 0)
    above, gap = spots["parent"][child], np.full(len(child), np.nan)
    lines = {axis: np.stack((spots[axis][above], spots[axis][child], gap), 1).ravel() for axis in ("x", "y")}
    text = [
        f"node {n}<br>value {v:.3f}<br>visits {k}"
        for n, v, k in zip(spots["node"], spots["value"], spots["visits"], strict=True)
    ]
    size = 5.0 + 15.0 * np.sqrt(spots["visits"] / spots["visits"].max())
    finite = np.where(np.isfinite(spots["value"]), spots["value"], np.nan)
    marker = {"size": size, "color": finite, "colorscale": "Viridis", "showscale": True}
    figure = go.Figure()
    figure.add_trace(go.Scatter(**lines, mode="lines", line={"width": 0.5, "color": "#bbb"}, hoverinfo="skip"))
    figure.add_trace(go.Scatter(x=spots["x"], y=spots["y"], mode="markers", marker=marker, text=text, hoverinfo="text"))
    figure.update_layout(showlegend=False, xaxis={"visible": False}, yaxis={"title": "level"}, template="simple_white")
    return figure


# ---- rewards and fronts ----------------------------------------------------------------------------------------------


def draw_rewards(rewards: Mapping[str, Tensor], *, label: str = "reward", better: str = "higher") -> Any:
    """Shares of the delivered crystals at or above each reward, one curve an arm; invalid ones (NaN) never count.

    Args:
        rewards: arm → (n,).
        label: of the horizontal axis.
        better: ``"higher"``; or ``"lower"``, for energies: shares at or below.

    Raises:
        ConfigError: another ``better``.
    """
    import matplotlib.pyplot as plt

    if better not in ("higher", "lower"):
        raise ConfigError(f"better={better!r}; expected 'higher' or 'lower'")
    figure, axis = plt.subplots(figsize=(5.5, 3.6))
    for (arm, values), colour in zip(rewards.items(), (*_CYCLE, "0.4", "0.7") * 3, strict=False):
        known = np.sort(values[torch.isfinite(values)].numpy())
        share = np.arange(1, len(known) + 1) / max(len(values), 1)
        share = share if better == "lower" else share[::-1]
        axis.step(known, share, where="post" if better == "lower" else "pre", label=arm, color=colour)
    axis.set_xlabel(label)
    axis.set_ylabel(f"share at this or {better}")
    axis.set_ylim(0.0, 1.0)
    axis.legend()
    return figure


def draw_fronts(points: Mapping[str, Tensor], names: Sequence[str]) -> Any:
    """Everything that searches judged, and the Pareto front of each.

    Args:
        points: search → (n, 2), higher is better; rows that are not finite are left out.
        names: of the two objectives.

    Raises:
        ConfigError: not two objectives.
    """
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5.5, 4.0))
    for (search, values), colour in zip(points.items(), _CYCLE, strict=False):
        if values.ndim != 2 or values.shape[1] != 2:
            raise ConfigError(f"points[{search!r}] has shape {tuple(values.shape)}; expected (n, 2)")
        found = values[torch.isfinite(values).all(dim=1)].numpy()
        axis.scatter(*found.T, s=5, alpha=0.25, color=colour, linewidths=0)
        front = found[non_dominated(found).numpy()]
        front = front[np.argsort(front[:, 0])]
        axis.step(*front.T, where="pre", color=colour, label=f"{search}: {len(front)} on the front")
    axis.set_xlabel(names[0])
    axis.set_ylabel(names[1])
    axis.legend()
    return figure


def interactive_front(points: Tensor, names: Sequence[str], labels: Sequence[str]) -> Any:
    """All points of an archive as a plotly figure, the front in colour; pointing at one shows its label.

    Args:
        points: (n, 2), higher is better.
        names: of the two objectives.
        labels: n texts.
    """
    import plotly.graph_objects as go

    finite = torch.isfinite(points).all(dim=1)
    best = torch.zeros(len(points), dtype=torch.bool)
    best[finite] = non_dominated(points[finite])
    figure = go.Figure()
    for mask, name, style in (
        (finite & ~best, "judged", {"size": 5, "color": "#bbb"}),
        (best, "front", {"size": 8, "color": COLOURS["ours"]}),
    ):
        rows = torch.nonzero(mask).squeeze(1).tolist()
        x, y = points[rows].T.tolist() if rows else ([], [])
        text = [labels[i] for i in rows]
        figure.add_trace(go.Scatter(x=x, y=y, text=text, mode="markers", marker=style, name=name))
    figure.update_layout(xaxis={"title": names[0]}, yaxis={"title": names[1]}, template="simple_white")
    return figure


# ---- crystals --------------------------------------------------------------------------------------------------------


def draw_crystals(crystals: Mapping[str, Tensor], titles: Sequence[str] = (), *, columns: int = 4) -> Any:
    """Unit cells with their atoms (and the images on the cell's faces), one panel a crystal.

    Args:
        crystals: physical crystals (B, \\*).
        titles: B texts below the formula.
        columns: panels a line.

    Raises:
        ConfigError: none, or another number of titles.
    """
    import matplotlib.pyplot as plt

    count = len(crystals["numbers"])
    if not count or (titles and len(titles) != count):
        raise ConfigError(f"{count} crystals and {len(titles)} titles; expected one title each, or none")
    columns = min(columns, count)
    lines = math.ceil(count / columns)
    figure, axes = plt.subplots(lines, columns, figsize=(2.1 * columns, 2.5 * lines), squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    if figure.get_layout_engine() is not None:  # axes without a frame leave no room for what is written around them
        figure.get_layout_engine().set(h_pad=0.14)
    for row in range(count):
        axis = axes.flat[row]
        mask = crystals["mask"][row]
        numbers = crystals["numbers"][row][mask].tolist()
        _draw_cell(axis, crystals["lattice"][row].double().numpy(), crystals["coordinates"][row][mask].numpy(), numbers)
        title = reduced_formula(numbers) + (f"\n{titles[row]}" if titles else "")
        axis.set_title(title, fontsize=8)
    return figure


def _draw_cell(axis: Any, lattice: np.ndarray, coordinates: np.ndarray, numbers: Sequence[int]) -> None:
    """The cell in projection, far things first."""
    cell = lattice @ _VIEW.T
    corners = np.array([[corner >> k & 1 for k in range(3)] for corner in range(8)]) @ cell
    for a, b in _EDGES:
        axis.plot(*corners[[a, b], :2].T, color="0.6", linewidth=0.7, zorder=1)
    places, kinds = _with_images(coordinates, numbers)
    where = places @ cell
    order = np.argsort(where[:, 2])
    present = sorted(set(numbers))
    radius = 0.28 * np.cbrt(abs(np.linalg.det(lattice)) / max(len(numbers), 1))
    for i in order:
        colour = _CYCLE[present.index(kinds[i]) % len(_CYCLE)]
        axis.add_patch(_ball(where[i, :2], radius * (0.8 + 0.4 * (kinds[i] == present[0])), colour))
    axis.set_aspect("equal")
    axis.autoscale_view()
    symbols = element_symbols()
    key = "  ".join(f"{symbols[z]}" for z in present)
    axis.text(0.5, -0.02, key, transform=axis.transAxes, ha="center", va="top", fontsize=7, color="0.3")


def _ball(centre: np.ndarray, radius: float, colour: str) -> Any:
    from matplotlib.patches import Circle

    return Circle(tuple(centre), radius, facecolor=colour, edgecolor="white", linewidth=0.6, zorder=2)


def _with_images(coordinates: np.ndarray, numbers: Sequence[int]) -> tuple[np.ndarray, list[int]]:
    """Atoms on a face, edge or corner of the cell appear at all of them."""
    places, kinds = [], []
    for place, number in zip(np.mod(coordinates, 1.0), numbers, strict=True):
        place = np.where(place > 1.0 - 1e-3, 0.0, place)
        shifts = [(0.0, 1.0) if value < 1e-3 else (0.0,) for value in place]
        for shift in np.stack(np.meshgrid(*shifts, indexing="ij"), -1).reshape(-1, 3):
            places.append(place + shift)
            kinds.append(number)
    return np.array(places), kinds
