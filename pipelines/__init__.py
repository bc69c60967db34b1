"""The published methods as pipelines, one folder each; installed as ``genkit.pipelines``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genkit._lazy import lazy_exports

if TYPE_CHECKING:
    from genkit.pipelines.block_diffusion.pipeline import BlockDiffusionPipeline as BlockDiffusionPipeline
    from genkit.pipelines.crystal_tree_search.pipeline import CrystalTreeSearchPipeline as CrystalTreeSearchPipeline
    from genkit.pipelines.heavy_tailed_flow.pipeline import HeavyTailedFlowPipeline as HeavyTailedFlowPipeline
    from genkit.pipelines.rmmd.pipeline import RMMDPipeline as RMMDPipeline

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "BlockDiffusionPipeline": ".block_diffusion.pipeline",
        "CrystalTreeSearchPipeline": ".crystal_tree_search.pipeline",
        "HeavyTailedFlowPipeline": ".heavy_tailed_flow.pipeline",
        "RMMDPipeline": ".rmmd.pipeline",
    },
)
