"""The errors genkit raises on purpose. Each message says what was got, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["CheckpointError", "ConfigError", "GenkitError", "MissingExtraError", "nearest"]


class GenkitError(Exception):
    """Base class of the errors that genkit raises on purpose."""


class ConfigError(GenkitError, ValueError):
    """A configuration, argument or file that cannot mean what it says."""


class CheckpointError(GenkitError, RuntimeError):
    """A saved folder that is damaged, foreign or of another configuration."""


class MissingExtraError(GenkitError, ImportError):
    """An optional package is needed; the message names the extra that installs it."""


def nearest(name: str, names: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the nearest of ``names``, or an empty string when none is near."""
    close = difflib.get_close_matches(str(name), [str(n) for n in names], n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
