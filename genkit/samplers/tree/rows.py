"""Rows of states: a state is a tensor (B, *), or a dict of tensors with one batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["State", "put", "row_count", "stack_rows", "take", "where_rows"]

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
