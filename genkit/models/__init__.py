"""Small typed networks, denoiser wrappers, and adapters to diffusers' networks."""

from genkit._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "ClassifierFreeGuidance": ".guidance",
        "ConditionalMLP": ".mlp",
        "DiffusersDenoiser": ".adapters",
        "FeatureNetwork": ".features",
        "FixedPrecision": ".precision",
        "FourierTimeEmbedding": ".mlp",
        "load_causal_lm": ".pretrained",
    },
)
