"""Other recipes, on the same masks, scorer and evaluator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genkit._lazy import lazy_exports

if TYPE_CHECKING:
    from genkit.pipelines.block_diffusion.baselines.annealing import AnnealingObjective as AnnealingObjective

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"AnnealingObjective": ".annealing"})
