"""What the heavy-tailed flow is measured against: classical models of joint daily returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genkit._lazy import lazy_exports

if TYPE_CHECKING:
    from genkit.pipelines.heavy_tailed_flow.baselines.classical import (
        FilteredHistoricalSimulation as FilteredHistoricalSimulation,
    )
    from genkit.pipelines.heavy_tailed_flow.baselines.classical import Gaussian as Gaussian
    from genkit.pipelines.heavy_tailed_flow.baselines.classical import GeneralisedPareto as GeneralisedPareto
    from genkit.pipelines.heavy_tailed_flow.baselines.classical import MultivariateT as MultivariateT
    from genkit.pipelines.heavy_tailed_flow.baselines.classical import PeaksOverThreshold as PeaksOverThreshold
    from genkit.pipelines.heavy_tailed_flow.baselines.classical import RiskModel as RiskModel
    from genkit.pipelines.heavy_tailed_flow.baselines.classical import (
        rolling_historical_simulation as rolling_historical_simulation,
    )

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "FilteredHistoricalSimulation": ".classical",
        "Gaussian": ".classical",
        "GeneralisedPareto": ".classical",
        "MultivariateT": ".classical",
        "PeaksOverThreshold": ".classical",
        "RiskModel": ".classical",
        "rolling_historical_simulation": ".classical",
    },
)
