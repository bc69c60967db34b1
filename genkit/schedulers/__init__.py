"""Noise levels and pure transition kernels."""

from genkit._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "CategoricalTransition": ".transition",
        "DiffusersScheduler": ".diffusers_adapter",
        "FlowScheduler": ".flow",
        "GaussianScheduler": ".gaussian",
        "GaussianTransition": ".transition",
        "MaskedBlockScheduler": ".masked",
        "ProductScheduler": ".product",
        "ProductTransition": ".product",
        "Transition": ".transition",
        "VPScheduler": ".vp",
        "WrappedNormalTransition": ".transition",
        "WrappedScheduler": ".wrapped",
    },
)
