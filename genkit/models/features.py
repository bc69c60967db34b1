"""A small convolutional classifier whose last hidden layer measures images: the network of Fréchet distances here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torch.nn import functional as F

from genkit._checks import checked_count, checked_number, checked_shape, got
from genkit.errors import ConfigError

__all__ = ["FeatureNetwork", "frozen"]


class _Block(nn.Module):
    """skip(h) + W₂ silu(norm(W₁ silu(norm(h)))), 3 x 3 convolutions; skip is the identity where the widths are equal.

    Groups of at most 8 are normalised, not batches: an image's features depend on that image alone.
    """

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(width_in), _norm(width_out)
        self.conv1 = nn.Conv2d(width_in, width_out, 3, padding=1)
        self.conv2 = nn.Conv2d(width_out, width_out, 3, padding=1)
        self.skip = nn.Identity() if width_in == width_out else nn.Conv2d(width_in, width_out, 1)

    def forward(self, h: Tensor) -> Tensor:
        inner = self.conv1(F.silu(self.norm1(h)))
        return self.skip(h) + self.conv2(F.silu(self.norm2(inner)))


class FeatureNetwork(ModelMixin, ConfigMixin):
    """Images (B, C, H, W) → logits (B, classes); `features` are the last hidden layer, (B, d).

    A 3 x 3 convolution, then one residual block a width, with means over 2 x 2 pixels between them. The last map is
    averaged over its pixels: z = mean silu(norm(h)), φ(x) = silu(A z + a), logits = W φ(x) + w. Everything is smooth,
    so gradients with respect to the images exist everywhere; features lie above -0.279, the least value of silu.

    It works in float32 and float64; images of another floating type are cast to that of the weights.

    Args:
        in_channels: C.
        image_size: H = W; its half, quarter, … (rounded down) must leave 2 pixels at the last width.
        num_classes: K >= 2.
        widths: channels of each block, the finest first.
        feature_channels: d.
        dropout: share of the features that the classifying layer loses in training, in [0, 1).

    Raises:
        ConfigError: a size outside its range; images of another shape.
    """

    @register_to_config
    def __init__(
        self,
        in_channels: int = 3,
        image_size: int = 32,
        num_classes: int = 10,
        widths: Sequence[int] = (24, 48, 96),
        feature_channels: int = 64,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.image_shape = (checked_count("in_channels", in_channels), image_size, image_size)
        sizes = _checked_widths(widths, image_size)
        count = checked_count("num_classes", num_classes, "an integer, at least 2", 2)
        checked_count("feature_channels", feature_channels)
        checked_number("dropout", dropout, "a share in [0, 1)", lambda p: 0.0 <= p < 1.0)
        self.stem = nn.Conv2d(in_channels, sizes[0], 3, padding=1)
        self.blocks = nn.ModuleList(_Block(a, b) for a, b in zip([sizes[0], *sizes], sizes, strict=False))
        self.norm = _norm(sizes[-1])
        self.hidden = nn.Linear(sizes[-1], feature_channels)
        self.drop = nn.Dropout(dropout)  # not self.dropout: ModelMixin gives configuration keys as attributes
        self.output = nn.Linear(feature_channels, count)

    def features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → φ(x), (B, d), in the type of the weights; dropout comes after it."""
        if not isinstance(x, Tensor) or x.shape[1:] != self.image_shape or x.ndim != 4:
            channels, height, width = self.image_shape
            raise ConfigError(f"images have {got(x)}; this network expects (B, {channels}, {height}, {width})")
        h = self.stem(x.to(self.output.weight.dtype))
        for i, block in enumerate(self.blocks):
            h = block(F.avg_pool2d(h, 2) if i else h)
        return F.silu(self.hidden(F.silu(self.norm(h)).mean(dim=(2, 3))))

    def classify(self, features: Tensor) -> Tensor:
        """φ(x), (B, d) → logits (B, classes)."""
        return self.output(self.drop(features))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → logits (B, classes), in the type of the weights."""
        return self.classify(self.features(x))


@contextmanager
def frozen(network: nn.Module) -> Iterator[None]:
    """Inside, ``network`` is in evaluation mode and its parameters get no gradients; afterwards all is as before.

    A graph that is built inside leads to the input alone, also when its backward pass runs later.
    """
    modes = [(module, module.training) for module in network.modules()]
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    try:
        network.eval()
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for module, mode in modes:
            module.training = mode


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(8, width), width)


def _checked_widths(widths: Sequence[int], image_size: int) -> tuple[int, ...]:
    sizes = checked_shape("widths", widths, "channels of each block, such as [24, 48, 96]", 1)
    for i, width in enumerate(sizes):
        checked_count(f"widths[{i}]", width)
    least = 2 ** len(sizes)
    expected = f"an integer, at least {least} with {len(sizes)} widths: give fewer widths, or larger images"
    checked_count("image_size", image_size, expected, least)
    return sizes
