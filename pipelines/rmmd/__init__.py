"""Rewarded moment matching distillation: a many-step teacher becomes a few-step student that also earns a reward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genkit._lazy import lazy_exports

if TYPE_CHECKING:
    from genkit.pipelines.rmmd.instant import InstantMomentObjective as InstantMomentObjective
    from genkit.pipelines.rmmd.objective import MomentMatchingObjective as MomentMatchingObjective

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "InstantMomentObjective": ".instant",
        "MomentMatchingObjective": ".objective",
    },
)
