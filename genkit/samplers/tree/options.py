"""What a search does, whatever chain it walks, and what it counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from genkit._checks import checked_count, checked_number
from genkit.errors import ConfigError, nearest
from genkit.samplers.tree.selection import Policy, Scalarisation

__all__ = ["MODES", "Counts", "SearchOptions"]

MODES = ("dts", "dts_star", "unbiased")


@dataclass(frozen=True)
class SearchOptions:
    """What a search does, whatever chain it walks (see `TreeSearch` for the meaning).

    Raises:
        ConfigError: a value out of range.
    """

    mode: str = "dts"
    lam: float = 1.0
    widening: tuple[float, float] = (2.0, 0.8)
    min_visits: int = 3
    slots: int = 64
    trees: int = 1
    reward_batch: int | None = None
    sync: bool = True
    explore: float = 0.0
    c_uct: float = 1.0
    kappa: float = 1.0
    branching: Sequence[int] | None = None
    floor: float = -math.inf
    scalarisation: Scalarisation | None = None
    max_network_calls: int | None = None

    def __post_init__(self) -> None:
        if self.mode == "dts*":
            object.__setattr__(self, "mode", "dts_star")
        if self.mode not in MODES:
            names = ", ".join(MODES)
            raise ConfigError(f"mode={self.mode!r}; expected one of {names}.{nearest(str(self.mode), MODES)}")
        expected = "a number from 0 to inf (inf: the best leaf alone counts)"
        checked_number("lam", self.lam, expected, lambda value: value >= 0.0)
        for name in ("slots", "trees", "min_visits"):
            checked_count(name, getattr(self, name))
        for name in ("reward_batch", "max_network_calls"):
            if getattr(self, name) is not None:
                checked_count(name, getattr(self, name))
        checked_number("explore", self.explore, "a share from 0 to 1", lambda value: 0.0 <= value <= 1.0)
        for name in ("c_uct", "kappa"):
            checked_number(name, getattr(self, name), "a finite number, at least 0", lambda v: 0.0 <= v < math.inf)
        checked_number("floor", self.floor, "a number below inf", lambda value: value < math.inf)
        if self.mode == "dts_star" and self.lam == 0.0 and self.kappa > 0.0:
            raise ConfigError("mode='dts_star' with lam=0 looks at no reward; expected lam above 0, or kappa=0")
        self._check_shape_of_tree()

    def _check_shape_of_tree(self) -> None:
        good = len(self.widening) == 2 and 0.0 < self.widening[0] < math.inf and 0.0 < self.widening[1] <= 1.0
        if not good:
            raise ConfigError(f"widening={self.widening}; expected (C, alpha) with C above 0 and 0 < alpha <= 1")
        if self.branching is not None and self.mode != "unbiased":
            raise ConfigError(f"branching= belongs to mode='unbiased'; got mode={self.mode!r}")

    def policy(self, leaf_depth: int) -> Policy:
        """The rule of selection in a tree of this depth."""
        last = leaf_depth - 1
        branching = self.branching
        if branching is None:  # two children at both ends: of the noise, and before the leaf
            branching = [2 if depth in (1, last) else 1 for depth in range(1, leaf_depth)]
        if self.mode == "unbiased" and len(branching) != last:
            raise ConfigError(
                f"branching has {len(branching)} entries; expected {last}: the children of nodes at depth 1 to {last}"
            )
        return Policy(
            self.mode, float(self.lam), leaf_depth, (float(self.widening[0]), float(self.widening[1])), self.min_visits,
            self.explore, self.c_uct, self.kappa, tuple(checked_count("branching", b) for b in branching),
        )  # fmt: skip


@dataclass
class Counts:
    """What a search counts; saved as it is.

    ``out_of_calls``: a rollout did not fit into ``max_network_calls``. ``reward_logs``: sums of the integers that the
    reward logs (why samples are invalid, for instance).
    """

    issued: int = 0
    done: int = 0
    revisits: int = 0
    network_calls: int = 0
    reward_calls: int = 0
    ticks: int = 0
    out_of_calls: bool = False
    raised: int = 0
    not_finite: int = 0
    network_seconds: float = 0.0
    reward_seconds: float = 0.0
    wall_seconds: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)
    reward_logs: dict[str, int] = field(default_factory=dict)
