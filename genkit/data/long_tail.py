"""Long-tailed classes: the exponential profile, and CIFAR-10 with it from a user's own files.

The profile keeps n_k = n_max f^(-k/(K-1)) samples of class k, so that the first class has f times as many as the last;
f is the imbalance factor.

References: Cui, Jia, Lin, Song, Belongie, "Class-balanced loss based on effective number of samples", CVPR 2019,
arXiv:1901.05555 (the profile). Krizhevsky, "Learning multiple layers of features from tiny images", 2009 (CIFAR-10).
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from genkit._checks import checked_count, checked_number
from genkit.data.splits import checked_split, first_of_each_class, keyed_unit
from genkit.data.text import checked_index
from genkit.errors import ConfigError

__all__ = ["CIFAR10_CLASSES", "Cifar10LT", "exponential_profile"]

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FILES = {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)}
_FILE_ROWS = 10_000
_ROW_BYTES = 1 + 3 * 32 * 32  # the label, then the red, green and blue planes
_ADVICE = "get the binary version of CIFAR-10 (cifar-10-binary.tar.gz), unpack it, and give its cifar-10-batches-bin"


def exponential_profile(n_max: int, num_classes: int, factor: float) -> list[int]:
    """Samples of each class, int(n_max (1/f)^(k/(K-1))) for k = 0 … K-1, cut down to whole ones as the reference does.

    ``exponential_profile(5000, 10, 100)`` is the CIFAR-10-LT of the literature: 5000, 2997, 1796, 1077, 645, 387, 232,
    139, 83 and 50, 12,406 in all.

    Args:
        n_max: samples of class 0, >= 1.
        num_classes: K >= 2.
        factor: f >= 1; 1 keeps all classes alike.

    Raises:
        ConfigError: an argument outside its range, or a factor that leaves a class without a sample.
    """
    most = checked_count("n_max", n_max)
    classes = checked_count("num_classes", num_classes, "an integer, at least 2", 2)
    share = 1.0 / checked_number("factor", factor, "a number, at least 1 (all classes alike)", _is_factor)
    counts = [int(most * share ** (k / (classes - 1.0))) for k in range(classes)]
    if counts[-1] < 1:
        raise ConfigError(
            f"an imbalance factor of {factor:g} leaves class {counts.index(0)} without a sample: the first class has "
            f"{most}; lower the factor to at most {most}, or hold out less"
        )
    return counts


def _is_factor(value: float) -> bool:
    return 1.0 <= value < math.inf


class Cifar10LT:
    r"""Long-tailed CIFAR-10 from a user's own files: ``data[index (b,)] -> {"sample", "label"}``.

    ``sample`` is float32 (b, 3, 32, 32) in [-1, 1], ``label`` int64 (b,), 0 to 9. The training split has
    :func:`exponential_profile` with classes in their own order; which images stay is decided by a hash of their place
    in the files, so a larger factor keeps a subset of what a smaller one keeps. (The reference shuffles with a
    generator; its counts are these, its images are others.) The test split is whole: 1000 images a class.

    Args:
        path: the folder of the binary version (``cifar-10-batches-bin``), with ``data_batch_1.bin`` to
            ``data_batch_5.bin`` and ``test_batch.bin``: 10,000 rows each of 1 label byte and 3072 pixel bytes. ``~``
            is home.
        factor: imbalance factor of the training split, >= 1.
        split: ``"train"`` or ``"test"``.
        seed: of the choice, an integer >= 0.

    Attributes:
        images: uint8 (n, 3, 32, 32).  label: int64 (n,).  class_counts: int64 (10,).
        classes: the ten names.

    Raises:
        ConfigError: an unknown split, a factor or seed outside its range; no such folder, a missing file or one of
            another size, labels above 9, the Python version (its files are pickles, which genkit never reads); an
            index out of range.
    """

    def __init__(self, path: str | Path, factor: float = 100.0, split: str = "train", *, seed: int = 0) -> None:
        self.split = checked_split(split, ("train", "test"))
        self.seed = checked_count("seed", seed, "an integer, at least 0", 0)
        self.factor = checked_number("factor", factor, "a number, at least 1 (all classes alike)", _is_factor)
        self.classes = CIFAR10_CLASSES
        folder = _checked_folder(Path(path).expanduser())
        rows = np.concatenate([_read_rows(folder / name) for name in _FILES[split]])
        label = torch.from_numpy(rows[:, 0].astype(np.int64))
        if split == "train":
            kept = self._kept(label)
            rows, label = rows[kept.numpy()], label[kept]
        self.label = label
        self.images = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32).copy())
        self.class_counts = torch.bincount(label, minlength=10)

    def _kept(self, label: Tensor) -> Tensor:
        fewest = int(torch.bincount(label, minlength=10).min())  # 5000 of each in the published files
        counts = exponential_profile(fewest, 10, self.factor)
        priority = [keyed_unit(f"CIFAR-10-LT {self.seed}", str(row).encode()) for row in range(len(label))]
        return first_of_each_class(label, counts, priority)

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: Tensor) -> dict[str, Tensor]:
        rows = checked_index(index, len(self), "Cifar10LT")
        return {"sample": self.images[rows].to(torch.float32) / 127.5 - 1.0, "label": self.label[rows]}


def _checked_folder(folder: Path) -> Path:
    if folder.is_file():
        raise ConfigError(f"{folder} is a file, expected a folder; {_ADVICE}")
    if not folder.is_dir():
        raise ConfigError(f"no folder {folder}; {_ADVICE}")
    if (folder / "cifar-10-batches-bin").is_dir() and not (folder / "data_batch_1.bin").exists():
        raise ConfigError(f"the files lie one folder further down: give {folder / 'cifar-10-batches-bin'}")
    return folder


def _read_rows(source: Path) -> np.ndarray:
    """uint8 (rows, 3073) of one file of the binary version."""
    expected = _FILE_ROWS * _ROW_BYTES
    if not source.is_file():
        if source.with_suffix("").is_file():
            raise ConfigError(
                f"{source.parent} holds the Python version of CIFAR-10, whose files are pickles: reading one could run "
                f"anything, so genkit does not; {_ADVICE}"
            )
        raise ConfigError(f"no file {source.name} in {source.parent}; {_ADVICE}")
    size = source.stat().st_size
    if size != expected:
        raise ConfigError(
            f"{source} has {size:,} bytes, expected {expected:,} ({_FILE_ROWS:,} rows of {_ROW_BYTES}): it is cut "
            f"short or another file; {_ADVICE}"
        )
    rows = np.fromfile(source, dtype=np.uint8).reshape(_FILE_ROWS, _ROW_BYTES)
    if int(rows[:, 0].max()) > 9:
        row = int(np.argmax(rows[:, 0] > 9))
        raise ConfigError(f"{source}, row {row}: label {rows[row, 0]}, expected 0 to 9; the file is damaged; {_ADVICE}")
    return rows
