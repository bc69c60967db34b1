"""Heavy-tailed flow matching by random clocks. See README.md in this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genkit._lazy import lazy_exports

if TYPE_CHECKING:
    from genkit.pipelines.heavy_tailed_flow.clocks import Clock as Clock
    from genkit.pipelines.heavy_tailed_flow.clocks import GaussianClock as GaussianClock
    from genkit.pipelines.heavy_tailed_flow.clocks import SplicedClock as SplicedClock
    from genkit.pipelines.heavy_tailed_flow.clocks import StableClock as StableClock
    from genkit.pipelines.heavy_tailed_flow.clocks import StudentTClock as StudentTClock
    from genkit.pipelines.heavy_tailed_flow.config import Config as Config
    from genkit.pipelines.heavy_tailed_flow.denoiser import ClockDenoiser as ClockDenoiser
    from genkit.pipelines.heavy_tailed_flow.objective import HeavyTailedFlowObjective as HeavyTailedFlowObjective
    from genkit.pipelines.heavy_tailed_flow.pipeline import HeavyTailedFlowOutput as HeavyTailedFlowOutput
    from genkit.pipelines.heavy_tailed_flow.pipeline import HeavyTailedFlowPipeline as HeavyTailedFlowPipeline

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Clock": ".clocks",
        "ClockDenoiser": ".denoiser",
        "Config": ".config",
        "GaussianClock": ".clocks",
        "HeavyTailedFlowObjective": ".objective",
        "HeavyTailedFlowOutput": ".pipeline",
        "HeavyTailedFlowPipeline": ".pipeline",
        "SplicedClock": ".clocks",
        "StableClock": ".clocks",
        "StudentTClock": ".clocks",
    },
)
