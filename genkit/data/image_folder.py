"""A user's own images in one folder a class, read as they are asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from genkit._checks import checked_count
from genkit.data.text import checked_index
from genkit.errors import ConfigError, MissingExtraError

__all__ = ["ImageFolder"]

_ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}


class ImageFolder:
    """Images as a map-style data set: ``data[index (b,)] -> {"sample", "label"}``.

    ``sample`` is float32 (b, 3, L, L) in [-1, 1], the largest centred square reduced by means; ``label`` int64 (b,),
    the place of the image's folder in ``classes``. Nothing is kept in memory.

    Args:
        root: a folder with one folder a class.
        image_size: L.

    Attributes:
        classes: names of the folders, sorted.  files: all images, by class and name.  label: int64 (n,).

    Raises:
        ConfigError: no such folder, no class or a class without an image; an image that cannot be read (it is named).
        MissingExtraError: pillow is not installed.
    """

    def __init__(self, root: str | Path, image_size: int) -> None:
        self.root, self.image_size = Path(root).expanduser(), checked_count("image_size", image_size)
        if not self.root.is_dir():
            raise ConfigError(f"no folder {self.root}; expected one with a folder for each class")
        self.classes = tuple(sorted(path.name for path in self.root.iterdir() if path.is_dir()))
        by_class = [sorted(p for p in (self.root / c).iterdir() if p.suffix.lower() in _ENDINGS) for c in self.classes]
        empty = [name for name, files in zip(self.classes, by_class, strict=True) if not files]
        if not self.classes or empty:
            what = f"the class {empty[0]!r} has no image" if empty else "it has no folders"
            raise ConfigError(f"{self.root}: {what}; expected one folder a class with {', '.join(sorted(_ENDINGS))}")
        self.files = tuple(path for files in by_class for path in files)
        self.label = torch.tensor([i for i, files in enumerate(by_class) for _ in files])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Tensor) -> dict[str, Tensor]:
        rows = checked_index(index, len(self), "ImageFolder")
        images = [self._read(self.files[row]) for row in rows.tolist()]
        return {"sample": torch.stack(images), "label": self.label[rows]}

    def _read(self, path: Path) -> Tensor:
        try:
            from PIL import Image, ImageOps
        except ImportError as error:
            raise MissingExtraError("ImageFolder reads images with pillow; run `pip install pillow`") from error
        try:
            with Image.open(path) as image:
                square = ImageOps.fit(image.convert("RGB"), (self.image_size, self.image_size), Image.Resampling.BOX)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as an image ({error}); mend it or take it away") from error
        return torch.from_numpy(np.array(square)).movedim(-1, 0).to(torch.float32) / 127.5 - 1.0
