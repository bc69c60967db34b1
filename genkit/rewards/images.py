"""Differentiable rewards of how images look: grey, smooth, symmetric, dark (not from a paper).

Each is a mean over pixels, so that its value does not depend on the size of the image, and is judged in float32 or
finer. Ranges hold for pixels in [-1, 1]; values are in (squared) units of the pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from genkit._checks import got
from genkit.errors import ConfigError, nearest
from genkit.rewards.base import Context, Reward, Sample, field_of

__all__ = ["GreyScale", "Ink", "LaplacianSmoothness", "Symmetry"]

_AXES = {"width": -1, "height": -2}


class _ImageReward(Reward):
    """A mean over the pixels of what a subclass's ``terms`` gives.

    Args:
        field: the part of the sample that is judged, when it has parts.
    """

    differentiable = True
    shape, least = "(B, *, H, W)", 3

    def __init__(self, *, field: str | None = None) -> None:
        self.field = field

    def terms(self, x: Tensor) -> Tensor:
        """(B, *) → (B, *), what is averaged."""
        raise NotImplementedError(f"{type(self).__name__} must define terms()")

    def values(self, sample: Sample, context: Context | None) -> Tensor:
        x = field_of(sample, self.field, of=self)
        if x.ndim < self.least or not x.is_floating_point() or not x[:1].numel():
            raise ConfigError(f"{self}: images have {got(x)}, {x.dtype}; expected {self.shape}, floating point")
        return self.terms(x.to(torch.promote_types(x.dtype, torch.float32))).flatten(1).mean(dim=1)


class GreyScale(_ImageReward):
    r"""r(x) = −mean_{c, i} (x_{c i} − g_i)² with g_i = mean_c x_{c i}: minus the variance over the channels.

    Over pixels and channels, in squared pixel units, 0 for a grey image down to −8/9 (three channels) or −1 (two).
    Adding the same grey image to all channels changes nothing. ∂r/∂x = −2 (x − g)/n with n elements an image.

    Args:
        field: the part of the sample that is judged, when it has parts. Samples are (B, C, \*), C >= 2.

    Raises:
        ConfigError: one channel, or no images.
    """

    shape = "(B, C, *)"

    def terms(self, x: Tensor) -> Tensor:
        if x.shape[1] == 1:
            raise ConfigError(
                f"{self}: the sample {tuple(x.shape)} has one channel, so it is always grey; leave it out"
            )
        return -(x - x.mean(dim=1, keepdim=True)).square()


class LaplacianSmoothness(_ImageReward):
    r"""r(x) = −mean_i (x_i − mean_{j ∈ N(i)} x_j)², N(i) the 4 neighbours above, below, left and right that exist.

    A corner has 2 neighbours and an edge 3, so a linear ramp costs nothing inside and a little at the edges it meets.
    In squared pixel units, 0 for a constant image down to −4 for a checkerboard of ±1. Video frames and channels are
    judged one by one.

    Args:
        field: the part of the sample that is judged, when it has parts. Samples are (B, \*, H, W), H and W >= 2.

    Raises:
        ConfigError: images of less than 2 x 2 pixels, or no images.
    """

    def terms(self, x: Tensor) -> Tensor:
        if min(x.shape[-2:]) < 2:
            raise ConfigError(f"{self}: images have {got(x)}; expected H and W of at least 2, for neighbours")
        return -(x - _neighbours(x) / _neighbours(torch.ones_like(x[0]))).square()


def _neighbours(x: Tensor) -> Tensor:
    """Sum over the neighbours that exist, (…, H, W) → (…, H, W)."""
    total = torch.zeros_like(x)
    for axis in (-1, -2):
        n = x.shape[axis] - 1
        edge = torch.zeros_like(x.narrow(axis, 0, 1))
        total = total + torch.cat((x.narrow(axis, 1, n), edge), axis) + torch.cat((edge, x.narrow(axis, 0, n)), axis)
    return total


class Symmetry(_ImageReward):
    r"""r(x) = −mean_i (x_i − x_{m(i)})², m(i) the pixel's mirror image.

    In squared pixel units, 0 for a symmetric image down to −4. A pixel on the mirror line counts with 0.

    Args:
        axis: which coordinate is mirrored: ``"width"`` (left is like right) or ``"height"`` (top is like bottom).
        field: the part of the sample that is judged, when it has parts. Samples are (B, \*, H, W).

    Raises:
        ConfigError: another axis, one that is a single pixel long, or no images.
    """

    def __init__(self, axis: str = "width", *, field: str | None = None) -> None:
        if axis not in _AXES:
            raise ConfigError(f"Symmetry(axis={axis!r}): expected 'width' or 'height'.{nearest(str(axis), _AXES)}")
        super().__init__(field=field)
        self.axis = axis

    def terms(self, x: Tensor) -> Tensor:
        if x.shape[_AXES[self.axis]] < 2:
            raise ConfigError(
                f"{self}: images have {got(x)}; expected a {self.axis} of at least 2, or all are symmetric"
            )
        return -(x - x.flip(_AXES[self.axis])).square()

    def __repr__(self) -> str:
        return f"Symmetry(axis={self.axis!r})"


class Ink(_ImageReward):
    r"""r(x) = mean_i x_i, in pixel units, −1 to 1: how much ink is on the paper where 1 is ink; ∂r/∂x = 1/n.

    Args:
        field: the part of the sample that is judged, when it has parts. Samples are (B, \*).
    """

    shape, least = "(B, *)", 2

    def terms(self, x: Tensor) -> Tensor:
        return x
