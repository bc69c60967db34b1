"""The pipeline around a feature network: images in, features for Fréchet distances and logits out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils import BaseOutput
from numpy.typing import NDArray
from torch import Tensor

from genkit._checks import checked_count, got
from genkit.errors import ConfigError
from genkit.models.features import FeatureNetwork, frozen
from genkit.pipeline import GenkitPipeline

__all__ = ["FeatureOutput", "FeaturePipeline"]

_ROUNDING = 1e-3  # beyond [-1, 1]


@dataclass
class FeatureOutput(BaseOutput):
    """What a call returns.

    Args:
        features: float32 (n, d), the last hidden layer.
        logits: float32 (n, classes).
    """

    features: Tensor | NDArray[Any]
    logits: Tensor | NDArray[Any]


class FeaturePipeline(GenkitPipeline):
    """Features and logits of images, for :func:`genkit.metrics.frechet_distance` and its like.

    Values that different networks give do not compare, so a table names the network; ``pipe.config.name`` does.

    Args:
        network: the trained network.
        name: what results are labelled with, such as ``"features-emoji32"``.
    """

    def __init__(self, network: FeatureNetwork, name: str = "features") -> None:
        super().__init__()
        self.register_modules(network=network)
        self.register_to_config(name=name)

    @torch.no_grad()
    def __call__(
        self, images: Tensor, batch_size: int = 512, output_type: str = "pt", return_dict: bool = True
    ) -> FeatureOutput | tuple[Tensor | NDArray[Any], ...]:
        """Features of images, without gradient and without dropout, on the network's device.

        Args:
            images: (n, C, H, W), floating point in [-1, 1], of the network's size; n >= 1.
            batch_size: how many are held at once; it changes the result by rounding only.
            output_type: ``"pt"`` (on the CPU) or ``"np"``.
            return_dict: a `FeatureOutput`, or the tuple of its fields.

        Raises:
            ConfigError: another shape or type, NaN or infinity, pixels outside [-1, 1] (up to rounding).
        """
        if output_type not in ("pt", "np"):
            raise ConfigError(f"output_type={output_type!r}; expected 'pt' or 'np'")
        batch_size = checked_count("batch_size", batch_size)
        _check_images(images, self.network.image_shape)
        device = next(self.network.parameters()).device
        parts: list[tuple[Tensor, Tensor]] = []
        with frozen(self.network), self.progress_bar(total=-(-len(images) // batch_size)) as bar:
            for part in images.split(batch_size):
                features = self.network.features(part.to(device))
                parts.append((features.float().cpu(), self.network.classify(features).float().cpu()))
                bar.update()
        found: tuple[Any, ...] = tuple(torch.cat(column) for column in zip(*parts, strict=True))
        if output_type == "np":
            found = tuple(column.numpy() for column in found)
        return FeatureOutput(*found) if return_dict else found


def _check_images(images: Any, shape: tuple[int, int, int]) -> None:
    channels, height, width = shape
    expected = f"a tensor (n, {channels}, {height}, {width}), floating point in [-1, 1], n >= 1"
    if not isinstance(images, Tensor) or images.shape[1:] != shape or images.ndim != 4 or not len(images):
        raise ConfigError(f"images have {got(images)}; expected {expected}")
    if not images.is_floating_point():
        raise ConfigError(f"images are {images.dtype}; expected {expected}: bytes are images / 127.5 - 1")
    bad = int((~torch.isfinite(images).flatten(1).all(dim=1)).sum())
    if bad:
        raise ConfigError(f"{bad} of {len(images)} images hold NaN or infinity; leaving them out would flatter a model")
    least, most = float(images.min()), float(images.max())
    if least < -1.0 - _ROUNDING or most > 1.0 + _ROUNDING:
        raise ConfigError(
            f"pixels from {least:.3g} to {most:.3g}; expected [-1, 1]: samples of a model are shown, and judged, after "
            "images.clamp(-1, 1)"
        )
