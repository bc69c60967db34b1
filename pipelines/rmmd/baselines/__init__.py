"""What rewarded moment matching is measured against: other distillations, and a trained start of the walk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genkit._lazy import lazy_exports

if TYPE_CHECKING:
    from genkit.pipelines.rmmd.baselines.dmd2 import DMD2Objective as DMD2Objective
    from genkit.pipelines.rmmd.baselines.noise import HyperNoiseObjective as HyperNoiseObjective
    from genkit.pipelines.rmmd.baselines.noise import NoisyStart as NoisyStart
    from genkit.pipelines.rmmd.baselines.noise import hypernoise_latents as hypernoise_latents
    from genkit.pipelines.rmmd.baselines.noise import noise_network as noise_network
    from genkit.pipelines.rmmd.baselines.one_step import DiffInstructObjective as DiffInstructObjective

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "DMD2Objective": ".dmd2",
        "DiffInstructObjective": ".one_step",
        "HyperNoiseObjective": ".noise",
        "NoisyStart": ".noise",
        "hypernoise_latents": ".noise",
        "noise_network": ".noise",
    },
)
