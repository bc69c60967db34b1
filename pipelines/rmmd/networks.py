"""The networks that answer (x, t, cond), and diffusers' networks as such.

Differs from the paper in: the small network here is this project's; the paper's are U-ViTs and a graph transformer.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from genkit._checks import checked_shape
from genkit.errors import ConfigError
from genkit.models.adapters import DiffusersDenoiser
from genkit.models.mlp import ConditionalMLP

__all__ = ["MLPDenoiser", "as_denoiser", "network_of"]


class MLPDenoiser(ModelMixin, ConfigMixin):  # type: ignore[misc]  # diffusers is untyped
    """A residual perceptron over the flattened sample: (x, t, cond) → model output.

    With unit-variance data, the prediction type ``"v_prediction"`` and a variance-preserving chain it is preconditioned
    as in Karras et al., arXiv 2206.00364, Table 1 with σ_data = 1: there c_skip x = α x_t and c_out = σ.

    Args:
        sample_shape: shape of one sample, (1, 8, 8) or (15,).
        prediction_type: what it is trained to predict.
        num_classes: classes it is told as ``cond["class_labels"]``, int64 (B,); 0: none. Without a condition it is told
            the null class.
        cond_channels: size of ``cond["condition"]``, (B, cond_channels); 0: none.
        width, blocks, dropout: see :class:`genkit.models.ConditionalMLP`.
    """

    @register_to_config
    def __init__(
        self,
        sample_shape: Sequence[int],
        prediction_type: str = "v_prediction",
        num_classes: int = 0,
        cond_channels: int = 0,
        width: int = 128,
        blocks: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        shape = checked_shape("sample_shape", sample_shape, "the shape of one sample")
        self.prediction_type, self.num_classes, self.cond_channels = prediction_type, num_classes, cond_channels
        self.mlp = ConditionalMLP(math.prod(shape), cond_channels, width, blocks, num_classes, dropout)

    def forward(self, x: Tensor, t: Tensor, cond: Mapping[str, Tensor] | None = None) -> Tensor:
        """x (B, \\*), t (B,) → (B, \\*) in the dtype of x.

        Raises:
            ConfigError: the condition lacks an entry, or has one that this network does not know.
        """
        labels, condition = self._told(cond, x)
        return self.mlp(x.flatten(1), t, condition, labels).reshape(x.shape).to(x.dtype)

    def _told(self, cond: Mapping[str, Tensor] | None, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        sizes = {"class_labels": self.num_classes, "condition": self.cond_channels}
        known = {name for name, size in sizes.items() if size}
        given = set(cond or {})
        missing = known - given - ({"class_labels"} if cond is None else set())
        if missing or given - known:
            raise ConfigError(
                f"this network is told {sorted(known) or 'nothing'}, and got {sorted(given) or 'nothing'}"
            )
        if cond is None:
            null = torch.full((len(x),), self.num_classes, device=x.device) if self.num_classes else None
            return null, None
        return cond.get("class_labels"), cond.get("condition")


def as_denoiser(network: nn.Module, prediction_type: str) -> nn.Module:
    """A network as (x, t, cond) → output: one that already is, or diffusers' network in :class:`DiffusersDenoiser`.

    A diffusers network with more input than output channels sees ``cond["condition"]`` beside the sample; one with
    class embeddings is told the last class where there is no condition.

    Args:
        network: answers ``forward(x, t, cond)``, or is a network of diffusers (``forward(sample, timestep, …)``).
        prediction_type: of a diffusers network.

    Raises:
        ConfigError: its ``forward`` is neither.
    """
    names = list(inspect.signature(network.forward).parameters)
    if names[:3] == ["x", "t", "cond"]:
        return network
    if "timestep" not in names:
        raise ConfigError(
            f"{type(network).__name__}.forward takes {names}; expected (x, t, cond), or a network of diffusers with a "
            "timestep"
        )
    options = getattr(network, "config", {})
    classes, seen, made = (options.get(key) for key in ("num_class_embeds", "in_channels", "out_channels"))
    beside = ("condition",) if seen and made and seen > made else ()
    null = {"class_labels": classes - 1} if classes and not beside else {}
    return DiffusersDenoiser(network, prediction_type, null=null, beside=beside)


def network_of(denoiser: nn.Module) -> nn.Module:
    """The network itself: what :func:`as_denoiser` was given."""
    return denoiser.model if isinstance(denoiser, DiffusersDenoiser) else denoiser
