"""Checks of arguments that several folders share; each error says what was got and what was expected."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from genkit.errors import ConfigError, nearest

__all__ = [
    "check_generator",
    "check_same_shape",
    "checked_changes",
    "checked_count",
    "checked_eta",
    "checked_number",
    "checked_shape",
    "got",
]


def got(value: Any) -> str:
    """``shape (2, 3)`` of a tensor, ``type list`` of anything else."""
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"


def checked_number(name: str, value: Any, expected: str, accepts: Callable[[float], bool] | None = None) -> float:
    """``value`` as a float where it is a number (not a bool, not text) that ``accepts``.

    Raises:
        ConfigError: ``{name}={value}; expected {expected}``.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (accepts and not accepts(value)):
        raise ConfigError(f"{name}={reprlib.repr(value)}; expected {expected}")
    return float(value)


def checked_eta(eta: Any) -> float:
    """A stochasticity: a number from 0 to 1."""
    expected = "a number from 0 (deterministic) to 1 (ancestral)"
    return checked_number("eta", eta, expected, lambda value: 0.0 <= value <= 1.0)


def checked_count(name: str, value: Any, expected: str = "a positive integer", least: int = 1) -> int:
    """``value`` where it is an integer (not a bool) and at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{name}={reprlib.repr(value)}; expected {expected}")
    return int(value)


def checked_shape(name: str, shape: Any, expected: str, least: int = 0) -> tuple[int, ...]:
    """``shape`` as a tuple where it is a sequence of at least ``least`` sizes."""
    if isinstance(shape, str) or not isinstance(shape, Sequence) or len(shape) < least:
        raise ConfigError(f"{name}={reprlib.repr(shape)}; expected {expected}")
    return tuple(checked_count(f"{name}[{i}]", size, "a size, at least 0", 0) for i, size in enumerate(shape))


def check_same_shape(name: str, value: Any, reference_name: str, reference: Any) -> None:
    """Refuses a tensor of another shape than the reference: broadcasting would mix samples without a word."""
    if not isinstance(reference, Tensor):
        raise ConfigError(f"{reference_name} has {got(reference)}; expected a tensor (B, *)")
    if not isinstance(value, Tensor) or value.shape != reference.shape:
        raise ConfigError(
            f"{name} has {got(value)}; expected a tensor of shape {tuple(reference.shape)}, that of {reference_name}"
        )


def check_generator(generator: Any) -> None:
    """Refuses what is neither a ``torch.Generator``, a sequence of them, nor None."""
    several = generator if isinstance(generator, Sequence) else [generator]
    if generator is not None and not all(isinstance(one, torch.Generator) for one in several):
        raise ConfigError(
            f"generator={reprlib.repr(generator)}; expected a torch.Generator, a list with one per sample, or None "
            "(for a seed: torch.Generator().manual_seed(seed))"
        )


def checked_changes(changed: Any, names: Collection[str]) -> Mapping[str, Any]:
    """What a callback returned, as a mapping: it may return None, or a mapping with some of ``names``."""
    if changed is None:
        return {}
    if not isinstance(changed, Mapping):
        expected = " and ".join(repr(name) for name in names)
        raise ConfigError(
            f"callback_on_step_end returned type {type(changed).__name__}; expected None or a mapping with {expected}"
        )
    for name in changed:
        if name not in names:
            raise ConfigError(
                f"callback_on_step_end returned {name!r}; expected only {', '.join(names)}.{nearest(name, names)}"
            )
    return changed
