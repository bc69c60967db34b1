"""From dataset indices to a batch: reading, stacking and checking."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from genkit.errors import ConfigError

__all__ = ["BatchReader", "TensorData", "TrainingData"]

Batch = dict[str, Any]
SAMPLE_ID = "sample_id"
_FINGERPRINT_SAMPLES = 64


class TrainingData(Protocol):
    """Map-style data: ``data[indices]`` with int64 indices (b,) gives a dict of tensors (b, \\*).

    A torch ``Dataset`` whose ``data[int]`` gives a dict of one sample is accepted as well and stacked. An attribute
    ``missing``, a collection of fields' names, allows NaN there: it says that a value is missing.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Mapping[str, Any]: ...


class TensorData:
    """Tensors (n, \\*) held in memory as training data, one name each.

    Raises:
        ConfigError: no tensor, or tensors of different lengths.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        lengths = {name: len(tensor) for name, tensor in tensors.items()}
        if len(set(lengths.values())) != 1:
            raise ConfigError(f"the fields of a data set need one common length, got {lengths or 'no fields'}")
        self.tensors = dict(tensors)

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: Tensor) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.tensors.items()}


class BatchReader:
    """Reads checked batches of ``data`` and adds ``sample_id``, the int64 dataset indices.

    Raises:
        ConfigError: empty data, data that gives no dict, samples of different shapes, NaN or infinity.
    """

    def __init__(self, data: TrainingData) -> None:
        self.data = data
        if len(data) < 1:
            raise ConfigError(
                f"the data set {type(data).__name__} is empty (0 samples); check its path and its filters"
            )
        self.missing = frozenset(getattr(data, "missing", ()))
        self.by_tensor = self._takes_tensors()

    def _takes_tensors(self) -> bool:
        try:  # two lengths, because a single sample's fields may happen to have one of them
            if all(_has_length(self.data[torch.zeros(n, dtype=torch.int64)], n) for n in (1, 3)):
                return True
        except Exception:  # whatever a per-sample data set raises when it is given a tensor
            pass
        sample = self.data[0]
        if not isinstance(sample, Mapping) or not sample:
            raise ConfigError(
                f"{type(self.data).__name__}[0] gives a {type(sample).__name__}, expected a dict of named fields; "
                f"return for example {{'x': tensor}}"
            )
        return False

    def read(self, indices: Tensor) -> Batch:
        """The batch of ``indices``, int64 (b,), on the data's own device."""
        batch = self._unchecked(indices)
        if SAMPLE_ID in batch:
            raise ConfigError(
                f"the data has a field {SAMPLE_ID!r}, which training sets to the dataset index; rename it"
            )
        for name, value in batch.items():
            _check(name, value, indices, nan=name in self.missing)
        return batch | {SAMPLE_ID: indices}

    def _unchecked(self, indices: Tensor) -> Batch:
        return dict(self.data[indices]) if self.by_tensor else _stack([self.data[int(i)] for i in indices])

    def fingerprint(self) -> str | None:
        """SHA-256 (hex) of up to 64 evenly spaced samples; None where two reads differ (random augmentation)."""
        with torch.random.fork_rng(devices=[]):  # an augmentation that draws here must not move the caller's draws
            first = self._hash_samples()
            return first if self._hash_samples() == first else None

    def _hash_samples(self) -> str:
        digest, size = hashlib.sha256(), len(self.data)
        count = min(size, _FINGERPRINT_SAMPLES)
        for i in range(count):  # one by one, because samples of different shapes need not fit into one batch
            index = i * (size - 1) // max(count - 1, 1)
            _add_to_hash(digest, self._unchecked(torch.tensor([index])))
        return digest.hexdigest()


def _add_to_hash(digest: hashlib._Hash, value: Any) -> None:
    if isinstance(value, Tensor) and value.layout is torch.strided:
        plain = value.detach().cpu().contiguous()
        digest.update(f"{plain.dtype} {tuple(plain.shape)}:".encode())
        digest.update(
            plain.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()
        )
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(f"{key}=".encode())
            _add_to_hash(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)}[".encode())
        for item in value:
            _add_to_hash(digest, item)
    else:  # the text of any other object may hold its address, which says nothing
        plain_text = isinstance(value, str | bytes | int | float | None)
        digest.update(repr(value if plain_text else type(value).__name__).encode())


def _has_length(batch: Any, length: int) -> bool:
    return isinstance(batch, Mapping) and len(batch) > 0 and all(_length(v) == length for v in batch.values())


def _length(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, list) else None


def _stack(samples: list[Mapping[str, Any]]) -> Batch:
    names = set(samples[0])
    if any(set(s) != names for s in samples):
        raise ConfigError(f"samples have different fields: {sorted({tuple(sorted(s)) for s in samples})}")
    return {name: _stack_field(name, [s[name] for s in samples]) for name in samples[0]}


def _stack_field(name: str, values: list[Any]) -> Any:
    shapes = {tuple(getattr(v, "shape", ())) for v in values}
    if len(shapes) > 1:
        raise ConfigError(
            f"field {name!r}: samples of one batch have the shapes {sorted(shapes)}; pad or crop them to one"
        )
    return torch.utils.data.default_collate(values)


def _check(name: str, value: Any, indices: Tensor, nan: bool) -> None:
    """Refuses a wrong length, infinity, and NaN unless it says that a value is missing."""
    if _length(value) != len(indices):
        raise ConfigError(f"field {name!r}: asked for {len(indices)} samples, got {_length(value)}")
    # on an accelerator this would wait for the device; there the check of the loss remains
    if not isinstance(value, Tensor) or value.device.type != "cpu" or not value.is_floating_point():
        return
    # one pass: a sum is finite only if all of its terms are (the reverse fails at overflow, so that is looked at again)
    if not math.isfinite(value.sum()) and not (good := _good(value, nan)).all():
        bad = ~good.reshape(len(value), -1).all(dim=1)
        raise ConfigError(
            f"field {name!r}: NaN or infinity in the samples {indices[bad].tolist()[:10]}; remove them or fill them in"
        )


def _good(value: Tensor, nan: bool) -> Tensor:
    return ~torch.isinf(value) if nan else torch.isfinite(value)
