"""Pairing clocks with data inside a micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from genkit.errors import ConfigError, nearest

__all__ = ["COUPLINGS", "couple_clocks"]

COUPLINGS = ("independent", "rank")


def couple_clocks(kind: str, clock: Tensor, radius: Tensor, tie_break: Tensor, labels: Tensor | None = None) -> Tensor:
    """For each datum the index of the clock it is paired with: a permutation of the micro-batch.

    ``"rank"`` pairs the k-th smallest clock with the k-th smallest data radius, within each label, so that the
    marginals of the clock and of the data given the label stay what they are. (Ranking over all labels would make the
    clock's law depend on the label.) Not in the paper's abstract.

    Args:
        kind: ``"independent"`` (as drawn) or ``"rank"``.
        clock: A = T_1 of each draw, (B,).
        radius: the data's size, (B,).
        tie_break: uniform numbers (B,), which order equal clocks or radii at random.
        labels: int64 (B,), or None for one group.

    Returns:
        int64 (B,): ``clock[result]`` belongs to the data.
    """
    if kind not in COUPLINGS:
        raise ConfigError(
            f"coupling={kind!r} is unknown; expected one of {', '.join(COUPLINGS)}.{nearest(kind, COUPLINGS)}"
        )
    if kind == "independent":
        return torch.arange(len(clock), device=clock.device)
    groups = torch.zeros_like(radius, dtype=torch.int64) if labels is None else labels
    # a clock is drawn for a datum, so it starts in that datum's group
    by_clock, by_radius = _order(groups, clock, tie_break), _order(groups, radius, tie_break.flip(0))
    paired = torch.empty_like(by_clock)
    paired[by_radius] = by_clock
    return paired


def _order(groups: Tensor, values: Tensor, tie_break: Tensor) -> Tensor:
    """Indices sorted by group, then value, then tie-break."""
    order = tie_break.argsort(stable=True)
    order = order[values[order].argsort(stable=True)]
    return order[groups[order].argsort(stable=True)]
