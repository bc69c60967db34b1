"""Which samples are held out and which stay in a long tail: decided by hashes of the samples, not by a generator.

A hash makes a choice that never depends on the order of a file or on what else is in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from genkit.errors import ConfigError, nearest

__all__ = ["checked_split", "first_of_each_class", "keyed_unit"]


def keyed_unit(purpose: str, identity: bytes) -> float:
    """A number in [0, 1), uniform over identities: 48 bits of BLAKE2b of ``purpose``, a zero byte and ``identity``.

    Args:
        purpose: what the number decides; two purposes give independent numbers. It holds no zero byte.
        identity: what makes the sample this one, such as its name or its pixels.
    """
    digest = hashlib.blake2b(purpose.encode() + b"\0" + identity, digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def first_of_each_class(label: Tensor, counts: Sequence[int], priority: Sequence[float]) -> Tensor:
    """Rows of the ``counts[k]`` samples of least priority in each class k, increasing, int64 (Σ counts,).

    A smaller count takes a subset of what a larger one takes.

    Args:
        label: int64 (n,), classes 0 to K-1.
        counts: K of them, none above the size of its class.
        priority: n numbers; among equal ones the earlier row goes first.
    """
    order = torch.argsort(torch.tensor(priority, dtype=torch.float64), stable=True)
    chosen = [order[label[order] == k][:count] for k, count in enumerate(counts)]
    return torch.cat(chosen).sort().values


def checked_split(split: str, allowed: Sequence[str] = ("train", "test", "all")) -> str:
    """``split`` where it is one of ``allowed``; `ConfigError` with the nearest name otherwise."""
    if split not in allowed:
        raise ConfigError(f"split must be one of {', '.join(allowed)}, got {split!r}.{nearest(str(split), allowed)}")
    return split
