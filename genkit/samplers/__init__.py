"""Walks over a chain: straight walks, searches of a tree, and the keyed noise they read."""

from genkit._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Chain": ".tree",
        "DecodeOutput": ".blockwise",
        "DecodeStep": ".blockwise",
        "DecodingStrategy": ".strategies",
        "EntropyBound": ".strategies",
        "FixedSteps": ".strategies",
        "GuidedProposal": ".tree",
        "Keys": ".noise",
        "Margin": ".strategies",
        "Random": ".strategies",
        "RolloutOutput": ".walk",
        "SchedulerStrategy": ".strategies",
        "SearchOptions": ".tree",
        "Sequential": ".strategies",
        "Solver": ".solvers",
        "Threshold": ".strategies",
        "TreeResult": ".tree",
        "TreeSearch": ".tree",
        "beam": ".tree",
        "best_of_n": ".tree",
        "decode_blocks": ".blockwise",
        "draw_keys": ".noise",
        "make_strategy": ".strategies",
        "rollout": ".walk",
        "self_normalised": ".tree",
        "smc": ".tree",
        "training_keys": ".noise",
    },
)
