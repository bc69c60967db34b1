"""Lazy re-exports (PEP 562): a package names its public objects and imports a module only when one of them is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(
    package: str, exports: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The ``__getattr__``, ``__dir__`` and ``__all__`` of a package whose names are loaded on first use.

    Args:
        package: the package's ``__name__``.
        exports: public name → module that defines it, relative (``".flow"``) or absolute.

    Example::

        __getattr__, __dir__, __all__ = lazy_exports(__name__, {"FlowScheduler": ".flow"})
    """

    def __getattr__(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(exports))}")
        return getattr(importlib.import_module(exports[name], package), name)

    return __getattr__, lambda: sorted(exports), sorted(exports)
