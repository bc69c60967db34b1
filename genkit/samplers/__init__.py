"""Walks over a chain: straight walks, and the keyed noise they read."""

from genkit._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Keys": ".noise",
        "RolloutOutput": ".walk",
        "Solver": ".solvers",
        "draw_keys": ".noise",
        "rollout": ".walk",
        "training_keys": ".noise",
    },
)
