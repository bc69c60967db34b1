"""Rows of states: a state is a tensor (B, *), or a dict of tensors with one batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from genkit.samplers.noise import Keys

__all__ = ["State", "draw_distinct", "put", "row_count", "stack_rows", "take", "where_rows"]

State = Any


def row_count(state: State) -> int:
    """The number of rows B of a state."""
    return len(next(iter(state.values())) if isinstance(state, Mapping) else state)


def take(state: Any, rows: Any) -> Any:
    """The rows of a state, condition or context at an index (a slice, an index tensor or a mask); None stays None."""
    if state is None:
        return None
    if isinstance(state, Mapping):
        return {name: value[rows] for name, value in state.items()}
    return state[rows]


def put(state: State, rows: Tensor, values: State) -> None:
    """Writes ``values`` into the rows of ``state``, in place."""
    if isinstance(state, Mapping):
        for name, value in state.items():
            value[rows] = values[name].to(value.dtype)
    else:
        state[rows] = values.to(state.dtype)


def draw_distinct(weights: Tensor, num: int, key: int) -> Tensor:
    """Positions drawn without replacement, each next one with probability ∝ ``weights`` (n,) of those left.

    At most ``num``, in the order of the draws; what has no weight is never drawn. The ``num`` least of exponential
    numbers over the weights: Kool, van Hoof, Welling, "Stochastic beams and where to find them", ICML 2019.
    """
    chance = weights.detach().cpu().to(torch.float64)
    rows = torch.nonzero(chance > 0.0).squeeze(1)
    zero = torch.zeros((), dtype=torch.int64)
    keys = Keys(torch.full((len(rows),), key), torch.arange(len(rows)), zero, "distinct")
    return rows[torch.argsort(keys.exponential() / chance[rows], stable=True)[:num]]


def stack_rows(states: Sequence[State]) -> State:
    """The rows of several states below one another."""
    if isinstance(states[0], Mapping):
        return {name: torch.cat([state[name] for state in states]) for name in states[0]}
    return torch.cat(list(states))


def where_rows(mask: Tensor, yes: State, no: State) -> State:
    """Row by row ``yes`` where ``mask`` (B,), else ``no``."""
    if isinstance(yes, Mapping):
        return {name: where_rows(mask, value, no[name]) for name, value in yes.items()}
    return torch.where(mask.reshape(-1, *[1] * (yes.ndim - 1)), yes, no)
