"""Real data that ships with genkit, synthetic data with known truth, and readers for a user's own files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genkit._lazy import lazy_exports

if TYPE_CHECKING:
    from genkit.data.mixtures import StableMixture as StableMixture
    from genkit.data.returns import MarketReturns as MarketReturns
    from genkit.data.returns import PriceTable as PriceTable
    from genkit.data.returns import ewma_volatility as ewma_volatility
    from genkit.data.returns import log_returns as log_returns
    from genkit.data.returns import market_closes as market_closes
    from genkit.data.returns import read_price_table as read_price_table
    from genkit.data.stable import positive_stable as positive_stable
    from genkit.data.stable import stable_tail_constant as stable_tail_constant

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "MarketReturns": ".returns",
        "PriceTable": ".returns",
        "ewma_volatility": ".returns",
        "log_returns": ".returns",
        "market_closes": ".returns",
        "read_price_table": ".returns",
        "StableMixture": ".mixtures",
        "positive_stable": ".stable",
        "stable_tail_constant": ".stable",
    },
)
