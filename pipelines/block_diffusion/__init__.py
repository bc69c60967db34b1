"""From an autoregressive checkpoint to a block-diffusion language model. See README.md in this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genkit._lazy import lazy_exports

if TYPE_CHECKING:
    from genkit.pipelines.block_diffusion.config import Config as Config
    from genkit.pipelines.block_diffusion.curriculum import BlockCurriculum as BlockCurriculum
    from genkit.pipelines.block_diffusion.likelihood import LikelihoodBound as LikelihoodBound
    from genkit.pipelines.block_diffusion.likelihood import nelbo as nelbo
    from genkit.pipelines.block_diffusion.masks import BlockGrid as BlockGrid
    from genkit.pipelines.block_diffusion.masks import one_pass_mask as one_pass_mask
    from genkit.pipelines.block_diffusion.masks import print_mask as print_mask
    from genkit.pipelines.block_diffusion.objective import BlockDiffusionObjective as BlockDiffusionObjective
    from genkit.pipelines.block_diffusion.pipeline import BlockDiffusionOutput as BlockDiffusionOutput
    from genkit.pipelines.block_diffusion.pipeline import BlockDiffusionPipeline as BlockDiffusionPipeline

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "BlockCurriculum": ".curriculum",
        "BlockDiffusionObjective": ".objective",
        "BlockDiffusionOutput": ".pipeline",
        "BlockDiffusionPipeline": ".pipeline",
        "BlockGrid": ".masks",
        "Config": ".config",
        "LikelihoodBound": ".likelihood",
        "nelbo": ".likelihood",
        "one_pass_mask": ".masks",
        "print_mask": ".masks",
    },
)
