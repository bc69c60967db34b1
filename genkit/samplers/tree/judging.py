"""Judging leaves: the reward is asked in batches, what fails costs only the leaf it is due to, and all is logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genkit.errors import ConfigError
from genkit.rewards import Reward, RewardOutput, reward_output
from genkit.samplers.tree.chain import row_count, take
from genkit.samplers.tree.store import Floats, Ints

__all__ = ["Judged", "LeafLog", "judge"]

log = logging.getLogger("genkit.samplers")
Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass
class Judged:
    """What the reward said about a batch of leaves.

    Args:
        node: (B,) the leaves' nodes.
        simulation: (B,) the rollouts that made them.
        rewards: (B, M) float64, NaN where invalid; (B, 0) where no reward was ever told.
        valid: (B,).
        raised: leaves at which the reward raised.
        not_finite: leaves whose state is not finite (the reward does not see them).
        seconds: what the reward took.
        failures: kind and message of the errors raised, with the leaf.
        logs: the integers among the reward's logs, which are counts, added up.
    """

    node: Ints
    simulation: Ints
    rewards: Floats
    valid: Mask
    raised: int = 0
    not_finite: int = 0
    seconds: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)
    logs: dict[str, int] = field(default_factory=dict)


def judge(reward: Reward, state: Any, context: Any, node: Ints, simulation: Ints) -> Judged:
    """Asks the reward about leaves; what is not finite is not asked, what raises costs only the leaf it is due to.

    Args:
        reward: the judge.
        state: clean samples (B, \\*).
        context: the reward's context, (B, \\*) each, or None.
        node: (B,) for the record.
        simulation: (B,) for the record.

    Raises:
        ConfigError: the reward cannot be asked like this at all (its own `ConfigError`, or a result of another kind).
    """
    started = time.perf_counter()
    whole = _finite_rows(state)
    found = Judged(node, simulation, np.zeros((len(node), 0)), np.zeros(len(node), bool))
    found.not_finite = int((~whole).sum())
    rows = np.flatnonzero(whole)
    if len(rows):
        _ask(reward, state, context, rows, found)
    found.seconds = time.perf_counter() - started
    return found


def _ask(reward: Reward, state: Any, context: Any, rows: Ints, found: Judged) -> None:
    """Asks about some rows; an error halves them, down to the sample that causes it (or until memory suffices)."""
    index = torch.from_numpy(rows)
    try:
        output = reward(take(state, index), _context_rows(context, rows))
    except ConfigError:
        raise
    except Exception as error:  # a black box may raise anything
        if len(rows) == 1:
            found.raised += 1
            said = {"node": int(found.node[rows[0]]), "error": type(error).__name__, "message": str(error)[:500]}
            found.failures.append(said)
            log.warning("the reward raised at leaf %(node)d: %(error)s: %(message)s", said)
            return
        middle = len(rows) // 2
        _ask(reward, state, context, rows[:middle], found)
        _ask(reward, state, context, rows[middle:], found)
        return
    _book(output if isinstance(output, RewardOutput) else reward_output(output), rows, found)


def _book(output: RewardOutput, rows: Ints, found: Judged) -> None:
    values = output.values.detach().cpu().to(torch.float64).numpy()
    values = values[:, None] if values.ndim == 1 else values
    if len(values) != len(rows):
        raise ConfigError(f"the reward gave {len(values)} values for {len(rows)} samples; expected one a sample")
    valid = output.valid.detach().cpu().numpy() & np.isfinite(values).all(axis=1)
    if found.rewards.shape[1] != values.shape[1]:
        found.rewards = _with_columns(found.rewards, values.shape[1])
    found.rewards[rows] = np.where(valid[:, None], values, np.nan)
    found.valid[rows] = valid
    for name, count in output.logs.items():
        if isinstance(count, int):
            found.logs[name] = found.logs.get(name, 0) + count


def _with_columns(rewards: Floats, columns: int) -> Floats:
    """Rewards that were never told, as NaN in every column."""
    if rewards.shape[1] not in (0, columns):
        raise ConfigError(f"the reward gave {columns} objectives, and {rewards.shape[1]} before; expected one number")
    return rewards if rewards.shape[1] == columns else np.full((len(rewards), columns), np.nan)


def _context_rows(context: Any, rows: Ints) -> Any:
    if context is None:
        return None
    index = torch.from_numpy(rows)
    return {key: value[index] if isinstance(value, Tensor) else value for key, value in context.items()}


def _finite_rows(state: Any) -> Mask:
    finite = np.ones(row_count(state), bool)
    for value in state.values() if isinstance(state, Mapping) else (state,):
        if value.is_floating_point():
            finite &= torch.isfinite(value).reshape(len(value), -1).all(dim=1).cpu().numpy()
    return finite


class LeafLog:
    """All judged leaves, in the order in which they were judged."""

    def __init__(self) -> None:
        self._batches: list[Judged] = []
        self.valid_count = 0
        self.best = np.zeros(0)
        self.known = 0

    def add(self, found: Judged) -> None:
        """Appends a batch."""
        self._batches.append(found)
        self.known += len(found.node)
        self.valid_count += int(found.valid.sum())
        if found.valid.any():
            best = found.rewards[found.valid].max(axis=0)
            self.best = np.maximum(self.best, best) if len(self.best) else best

    @property
    def num_objectives(self) -> int:
        """M, or 0 while no reward was told."""
        return len(self.best)

    def all(self) -> Judged:
        """All leaves as one batch."""
        self._batches = [self._since(0)]
        return self._batches[0]

    def _since(self, start: int) -> Judged:
        parts: list[Judged] = []
        left = self.known - start
        while left > 0 and len(parts) < len(self._batches):
            parts.append(self._batches[-1 - len(parts)])
            left -= len(parts[-1].node)
        parts.reverse()
        width = max((p.rewards.shape[1] for p in parts), default=0)
        skip = slice(-left, None)
        return Judged(
            np.concatenate([np.zeros(0, np.int64), *(p.node for p in parts)])[skip],
            np.concatenate([np.zeros(0, np.int64), *(p.simulation for p in parts)])[skip],
            np.concatenate([np.zeros((0, width)), *(_with_columns(p.rewards, width) for p in parts)])[skip],
            np.concatenate([np.zeros(0, bool), *(p.valid for p in parts)])[skip],
        )

    def since(self, start: int) -> dict[str, Any]:
        """The arrays of the leaves from the ``start``-th on."""
        part = self._since(start)
        return {name: getattr(part, name) for name in ("node", "simulation", "rewards", "valid")}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Appends what `since` gave."""
        self.add(Judged(saved["node"], saved["simulation"], saved["rewards"], saved["valid"]))
