"""Walks over a chain: straight walks, and the keyed noise they read."""

from genkit._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "DecodeOutput": ".blockwise",
        "DecodeStep": ".blockwise",
        "DecodingStrategy": ".strategies",
        "EntropyBound": ".strategies",
        "FixedSteps": ".strategies",
        "Keys": ".noise",
        "Margin": ".strategies",
        "Random": ".strategies",
        "RolloutOutput": ".walk",
        "SchedulerStrategy": ".strategies",
        "Sequential": ".strategies",
        "Solver": ".solvers",
        "Threshold": ".strategies",
        "decode_blocks": ".blockwise",
        "draw_keys": ".noise",
        "make_strategy": ".strategies",
        "rollout": ".walk",
        "training_keys": ".noise",
    },
)
