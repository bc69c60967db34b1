"""The nodes of a search as arrays: topology, counts and values in numpy, states in tensors, no Python object a node.

A child is *linked* (appended to its parent's list) when its first rollout has been judged; until then nothing can
select it and no value reads it. Lists of children are blocks of a common pool whose capacity is the next power of two,
so linking costs amortised constant time and a block can be read as one slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genkit.errors import ConfigError

__all__ = ["NodeStore", "StateRows", "expand_ranges"]

Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]
Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]

_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)
_ALONE = ""  # the field name of a state that is one tensor


def expand_ranges(starts: Ints, counts: Ints) -> Ints:
    """The indices ``starts[i] … starts[i] + counts[i] - 1`` of all ranges, one after the other, int64."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - ends + counts, counts)


class StateRows:
    """States of nodes by field, one row a node, grown by doubling; integers in the narrowest type that holds them.

    Args:
        example: a state (a tensor, or a dict of tensors) of any batch size, for fields, shapes, types and device.
        capacity: rows to make room for.
    """

    def __init__(self, example: Any, capacity: int) -> None:
        self.single = not isinstance(example, Mapping)
        fields = {_ALONE: example} if self.single else dict(example)
        self.dtypes = {name: value.dtype for name, value in fields.items()}
        self.rows = {
            name: torch.zeros((capacity, *v.shape[1:]), dtype=_narrowest(v.dtype), device=v.device)
            for name, v in fields.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take, spare ones included."""
        return sum(rows.numel() * rows.element_size() for rows in self.rows.values())

    def reserve(self, capacity: int) -> None:
        """Makes room for ``capacity`` rows."""
        for name, rows in self.rows.items():
            if len(rows) < capacity:
                self.rows[name] = torch.cat((rows, rows.new_zeros((capacity - len(rows), *rows.shape[1:]))))

    def write(self, start: int, state: Any) -> None:
        """Puts the rows of ``state`` (B, \\*) at ``start``.

        Raises:
            ConfigError: other fields or shapes than before.
        """
        fields = {_ALONE: state} if not isinstance(state, Mapping) else dict(state)
        if fields.keys() != self.rows.keys():
            raise ConfigError(f"a state has the fields {sorted(fields)}; expected {sorted(self.rows)}, as before it")
        for name, value in fields.items():
            self.write_field(name, start, value)

    def write_field(self, name: str, start: int, value: Tensor) -> None:
        """Puts the rows (B, \\*) of one field at ``start``."""
        if value.shape[1:] != self.rows[name].shape[1:]:
            got, expected = tuple(value.shape[1:]), tuple(self.rows[name].shape[1:])
            raise ConfigError(f"a state's field {name!r} has rows of shape {got}; expected {expected}, as before")
        self._widen(name, value)
        self.rows[name][start : start + len(value)] = value.to(self.rows[name].dtype)

    def _widen(self, name: str, value: Tensor) -> None:
        """A field of integers becomes wider when a value does not fit."""
        held = self.rows[name].dtype
        if held not in _INTEGERS or held == self.dtypes[name] or not len(value):
            return
        low, high = int(value.min()), int(value.max())
        for dtype in _INTEGERS[_INTEGERS.index(held) :]:
            if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
                self.rows[name] = self.rows[name].to(dtype)
                return

    def take(self, index: Ints | Tensor) -> Any:
        """The states of some rows, (B, \\*), in their own types."""
        where = torch.as_tensor(index, dtype=torch.int64)
        fields = {n: rows[where.to(rows.device)].to(self.dtypes[n]) for n, rows in self.rows.items()}
        return fields[_ALONE] if self.single else fields


def _narrowest(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype in (torch.int16, torch.int32, torch.int64) else dtype


class NodeStore:
    """The trees of a search.

    Args:
        trees: number of roots G; they are the nodes 0 … G - 1 at depth 0, without a state.
        columns: values K a node.
        capacity: nodes to make room for at first.

    Arrays over the nodes (read ``[:size]``): ``parent`` (-1 for roots), ``depth``, ``tree``, ``visits`` (judged
    rollouts through the node), ``in_flight`` (selected and not yet judged), ``pending`` (children that are on their
    way), ``num_children`` (linked ones), ``log_weight`` (log p/q of the edge that leads to the node), ``values``
    (cap, K), ``dirty`` (counts or values changed since the last save).
    """

    def __init__(self, trees: int = 1, columns: int = 1, capacity: int = 1024) -> None:
        if not 1 <= trees < 2**15:
            raise ConfigError(f"trees={trees}; expected 1 to {2**15 - 1}")
        self.trees, self.size = trees, 0
        self.parent, self.depth = np.zeros(0, np.int32), np.zeros(0, np.int8)
        self.tree, self.log_weight = np.zeros(0, np.int16), np.zeros(0, np.float64)
        self.visits, self.in_flight = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self.pending, self.num_children = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self.values, self.dirty = np.zeros((0, columns)), np.zeros(0, bool)
        self._block, self._pool, self._pool_size = np.zeros(0, np.int32), np.zeros(0, np.int32), 0
        self.states: StateRows | None = None
        self.new_links: list[Ints] = []  # linked since the last save, in order
        self._reserve(max(capacity, trees))
        self._append_topology(np.full(trees, -1), np.zeros(trees, int), np.arange(trees), np.zeros(trees))

    # --- growth ---------------------------------------------------------------------------------------------------

    _ARRAYS = (
        "parent", "depth", "tree", "log_weight", "visits", "in_flight", "pending", "num_children", "values", "dirty",
        "_block",
    )  # fmt: skip

    @property
    def capacity(self) -> int:
        """Nodes there is room for."""
        return len(self.parent)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays and states, spare room included."""
        arrays = sum(getattr(self, name).nbytes for name in self._ARRAYS) + self._pool.nbytes
        return arrays + (0 if self.states is None else self.states.nbytes)

    def _reserve(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        new = max(capacity, 2 * self.capacity)
        for name in self._ARRAYS:
            setattr(self, name, _grown(getattr(self, name), new))
        if self.states is not None:
            self.states.reserve(new)

    def set_columns(self, columns: int) -> None:
        """Changes the number of values a node while all of them are one floor (before the first judged leaf)."""
        if self.values.shape[1] != columns:
            self.values = np.repeat(self.values[:, :1], columns, axis=1)

    # --- nodes ----------------------------------------------------------------------------------------------------

    def _append_topology(self, parent: Any, depth: Any, tree: Any, log_weight: Any) -> Ints:
        count = len(parent)
        self._reserve(self.size + count)
        new = slice(self.size, self.size + count)
        self.parent[new], self.depth[new], self.tree[new] = parent, depth, tree
        self.log_weight[new] = log_weight
        self.size += count
        return np.arange(new.start, new.stop)

    def append(self, parent: Ints, depth: Ints, log_weight: Floats, state: Any) -> Ints:
        """Adds nodes that are not yet linked, and returns their indices (B,).

        Args:
            parent: (B,) node indices.
            depth: (B,) depths, at most 127.
            log_weight: (B,) log p/q of the edges; NaN counts as zero probability.
            state: the states (B, \\*).
        """
        weight = np.where(np.isnan(log_weight), -np.inf, log_weight)
        start = self.size
        new = self._append_topology(parent, depth, self.tree[parent], weight)
        if self.states is None:
            self.states = StateRows(state, self.capacity)
        self.states.write(start, state)
        return new

    def state_of(self, nodes: Ints) -> Any:
        """The states (B, \\*) of nodes below the root."""
        if self.states is None:
            raise ConfigError("the tree has no node with a state yet")
        return self.states.take(nodes)

    # --- children -------------------------------------------------------------------------------------------------

    def link(self, nodes: Ints) -> None:
        """Appends nodes (B,) to their parents' lists, in the order given."""
        if not len(nodes):
            return
        self.new_links.append(np.array(nodes, np.int32))
        order = np.argsort(self.parent[nodes], kind="stable")
        child = nodes[order]
        parents, starts, added = np.unique(self.parent[child], return_index=True, return_counts=True)
        before = self.num_children[parents]
        self._move_blocks(parents, before, before + added)
        rank = np.arange(len(child)) - np.repeat(starts, added)
        self._pool[np.repeat(self._block[parents] + before, added) + rank] = child
        self.num_children[parents] = before + added

    def _move_blocks(self, parents: Ints, before: Ints, after: Ints) -> None:
        """Gives the parents whose block is too small a new one; the old block's room is not used again."""
        room = np.where(before > 0, _next_power(before), 0)
        full = after > room
        if not full.any():
            return
        parents, before, sizes = parents[full], before[full], _next_power(after[full])
        ends = self._pool_size + np.cumsum(sizes)
        if int(ends[-1]) > len(self._pool):
            self._pool = _grown(self._pool, max(int(ends[-1]), 2 * len(self._pool), 1024))
        new = ends - sizes
        self._pool[expand_ranges(new, before)] = self._pool[expand_ranges(self._block[parents], before)]
        self._block[parents] = new
        self._pool_size = int(ends[-1])

    def children(self, nodes: Ints) -> tuple[Ints, Ints]:
        """The linked children of nodes (P,), one list after the other, and the lengths (P,) of the lists."""
        counts = self.num_children[nodes].astype(np.int64)
        if len(nodes) == 1:  # a slice, not a gather: a root may have very many children
            start = int(self._block[nodes[0]])
            return self._pool[start : start + int(counts[0])].astype(np.int64), counts
        return self._pool[expand_ranges(self._block[nodes].astype(np.int64), counts)].astype(np.int64), counts

    def first_child(self, nodes: Ints) -> Ints:
        """The child (B,) that was linked first, of nodes that have one."""
        return self._pool[self._block[nodes]].astype(np.int64)

    # --- saving -------------------------------------------------------------------------------------------------------

    def changes(self, start: int) -> dict[str, Any]:
        """What is new since the store was last saved, with ``start`` nodes (at first its roots): arrays and states.

        Reading does not change anything; `saved` marks the changes as saved.
        """
        new, dirty = slice(start, self.size), np.flatnonzero(self.dirty[: self.size])
        found = {name: getattr(self, name)[new].copy() for name in ("parent", "depth", "tree", "log_weight")}
        found |= {f"now.{n}": getattr(self, n)[dirty] for n in ("visits", "in_flight", "pending", "values")}
        found["now"] = dirty
        found["links"] = np.concatenate(self.new_links) if self.new_links else np.zeros(0, np.int32)
        rows = {} if self.states is None else self.states.rows
        return found | {f"state.{name}": value[new] for name, value in rows.items()}

    def saved(self) -> None:
        """Forgets what is new, after it was saved."""
        self.dirty[: self.size] = False
        self.new_links = []

    def apply(self, changes: Mapping[str, Any], example: Any) -> None:
        """Puts saved `changes` on top, oldest first.

        Args:
            changes: arrays, and tensors of states.
            example: a state of no rows, for fields and types, or None where no state was ever stored.
        """
        start = self.size
        self._append_topology(*(changes[name] for name in ("parent", "depth", "tree", "log_weight")))
        if example is not None:
            if self.states is None:
                self.states = StateRows(example, self.capacity)
            for name in self.states.rows:
                self.states.write_field(name, start, changes[f"state.{name}"])
        self.set_columns(changes["now.values"].shape[1])
        for name in ("visits", "in_flight", "pending", "values"):
            getattr(self, name)[changes["now"]] = changes[f"now.{name}"]
        self.link(changes["links"].astype(np.int64))
        self.saved()


def _grown(array: Any, rows: int) -> Any:
    new = np.zeros((rows, *array.shape[1:]), array.dtype)
    new[: len(array)] = array
    return new


def _next_power(counts: Ints) -> Ints:
    """The smallest power of two that is at least each count, and at least 1."""
    return np.left_shift(1, np.ceil(np.log2(np.maximum(counts, 1))).astype(np.int64), dtype=np.int64)
