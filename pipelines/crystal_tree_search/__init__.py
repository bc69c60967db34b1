"""Diffusion tree search for crystals. See README.md in this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genkit._lazy import lazy_exports

if TYPE_CHECKING:
    from genkit.pipelines.crystal_tree_search.config import Config as Config
    from genkit.pipelines.crystal_tree_search.model import CrystalTransformer as CrystalTransformer
    from genkit.pipelines.crystal_tree_search.objective import CrystalDiffusionObjective as CrystalDiffusionObjective
    from genkit.pipelines.crystal_tree_search.pipeline import CrystalTreeSearchPipeline as CrystalTreeSearchPipeline
    from genkit.pipelines.crystal_tree_search.state import CrystalCodec as CrystalCodec

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Config": ".config",
        "CrystalCodec": ".state",
        "CrystalDiffusionObjective": ".objective",
        "CrystalTransformer": ".model",
        "CrystalTreeSearchPipeline": ".pipeline",
    },
)
