"""Handwritten digits of 8 x 8 pixels, whole or with a long tail: small real images with classes.

The 1797 images are those that scikit-learn ships: the test set of the UCI "Optical recognition of handwritten digits",
by 13 people. Bitmaps of 32 x 32 were counted in blocks of 4 x 4, so every pixel is an integer from 0 to 16.
scikit-learn is installed by the user.

Reference: Alpaydin, Kaynak, "Optical recognition of handwritten digits", UCI Machine Learning Repository, 1998,
doi:10.24432/C50P49.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from genkit._checks import checked_count, checked_number
from genkit.data.long_tail import exponential_profile
from genkit.data.splits import checked_split, first_of_each_class, keyed_unit
from genkit.data.text import checked_index
from genkit.errors import ConfigError, MissingExtraError

__all__ = ["Digits"]


@lru_cache(maxsize=1)
def _digits() -> tuple[Tensor, Tensor]:
    """Images uint8 (1797, 8, 8), 0 to 16, and labels int64 (1797,)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError(
            "Digits reads the images that scikit-learn ships, which is not installed; run `pip install scikit-learn`"
        ) from error
    found = load_digits()
    return torch.from_numpy(found.images).to(torch.uint8), torch.from_numpy(found.target).to(torch.int64)


class Digits:
    r"""The 8 x 8 digits as a map-style data set: ``data[index (b,)] -> {"sample", "label"}``.

    ``sample`` is float32 (b, 1, 8, 8), grey levels v/8 - 1 for v = 0 … 16 (-1 is paper, 1 is ink); ``label`` int64
    (b,), 0 to 9. Of each class, ⌊n h⌋ of its n images are held out: those whose pixels have the least hash. A held-out
    half leaves enough images to measure distances between sets.

    Args:
        split: ``"train"``, ``"test"`` or ``"all"``.
        imbalance: f >= 1 thins the training split to :func:`genkit.data.exponential_profile` with classes 0 … 9 in
            this order, from the smallest class down (87 images at ``holdout=0.5``, so f <= 87 there); None keeps all.
            The test split is never thinned.
        holdout: h, the share of each class that is held out, in (0, 1).
        seed: of the choice of images that stay, an integer >= 0; the split does not depend on it, and a larger
            factor keeps a subset of what a smaller one keeps.

    Attributes:
        images: uint8 (n, 8, 8), 0 to 16.  label: int64 (n,).  class_counts: int64 (10,).

    Raises:
        ConfigError: an unknown split, a number outside its range, a class left without an image, ``imbalance`` with
            ``split="all"``; an index out of range.
        MissingExtraError: scikit-learn is not installed.
    """

    def __init__(
        self, split: str = "train", *, imbalance: float | None = None, holdout: float = 0.5, seed: int = 0
    ) -> None:
        self.split, self.imbalance = checked_split(split), imbalance
        self.holdout = checked_number("holdout", holdout, "a share in (0, 1)", lambda h: 0.0 < h < 1.0)
        self.seed = checked_count("seed", seed, "an integer, at least 0", 0)
        if imbalance is not None and split == "all":
            raise ConfigError(f"imbalance={imbalance!r} is for the training split, got split='all'; leave one out")
        images, label = _digits()
        rows = self._rows(images, label)
        self.images, self.label = images[rows], label[rows]
        self.class_counts = torch.bincount(self.label, minlength=10)

    def _rows(self, images: Tensor, label: Tensor) -> Tensor:
        """Rows of this split, increasing."""
        held = torch.zeros(len(label), dtype=torch.bool)
        sizes = torch.bincount(label, minlength=10).tolist()
        counts = [int(size * self.holdout) for size in sizes]
        if min(counts) < 1:
            raise ConfigError(
                f"holdout={self.holdout:g} leaves digit {counts.index(min(counts))} without a test image; "
                f"at least {1 / min(sizes):.2g} is needed"
            )
        held[first_of_each_class(label, counts, self._priority(images, "digits split"))] = True
        if self.split == "all":
            return torch.arange(len(label))
        rows = (held if self.split == "test" else ~held).nonzero().flatten()
        if self.split == "test" or self.imbalance is None:
            return rows
        fewest = int(torch.bincount(label[rows], minlength=10).min())
        kept = exponential_profile(fewest, 10, self.imbalance)
        return rows[first_of_each_class(label[rows], kept, self._priority(images[rows], f"digits tail {self.seed}"))]

    @staticmethod
    def _priority(images: Tensor, purpose: str) -> list[float]:
        return [keyed_unit(purpose, image.tobytes()) for image in images.numpy()]

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: Tensor) -> dict[str, Tensor]:
        rows = checked_index(index, len(self), "Digits")
        return {"sample": self.images[rows].unsqueeze(1).to(torch.float32) / 8.0 - 1.0, "label": self.label[rows]}
