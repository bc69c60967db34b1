"""genkit: generative models that walk a chain of denoising steps, as tested PyTorch pipelines.

Names are loaded on first use, so that ``import genkit`` stays as light as the interpreter::

    import genkit
    pipe = genkit.load("zoo:returns-flow")
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from genkit._lazy import lazy_exports

if TYPE_CHECKING:
    from genkit import data, metrics, models, pipelines, rewards, samplers, schedulers, training, zoo
    from genkit.errors import CheckpointError, ConfigError, GenkitError, MissingExtraError
    from genkit.pipeline import GenkitPipeline, load

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "GenkitError",
    "GenkitPipeline",
    "MissingExtraError",
    "__version__",
    "data",
    "load",
    "metrics",
    "models",
    "pipelines",
    "rewards",
    "samplers",
    "schedulers",
    "training",
    "zoo",
]

_exported, _names, _all = lazy_exports(
    __name__,
    {
        "CheckpointError": ".errors",
        "ConfigError": ".errors",
        "GenkitError": ".errors",
        "GenkitPipeline": ".pipeline",
        "MissingExtraError": ".errors",
        "load": ".pipeline",
    },
)
_SUBPACKAGES = frozenset(
    ("data", "metrics", "models", "pipelines", "rewards", "samplers", "schedulers", "training", "zoo")
)


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    return _exported(name)


def __dir__() -> list[str]:
    return list(__all__)


class _SourceTreeFinder:
    """Finds ``genkit.pipelines`` in the sibling folder ``pipelines/`` when genkit runs from a source tree.

    An installed genkit has the folder inside; this finder is asked last and only in a tree where it has not, so that
    ``python -m pytest`` and ``PYTHONPATH=.`` work without an installation.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != f"{__name__}.pipelines":
            return None
        return importlib.util.spec_from_file_location(
            fullname, self.folder / "__init__.py", submodule_search_locations=[str(self.folder)]
        )


def _find_pipelines_in_source_tree(package: Path) -> None:
    tree = package.parent
    inside, beside = package / "pipelines", tree / "pipelines"
    if not inside.exists() and (beside / "__init__.py").is_file() and (tree / "pyproject.toml").is_file():
        sys.meta_path.append(_SourceTreeFinder(beside))  # type: ignore[arg-type]  # a finder by protocol


_find_pipelines_in_source_tree(Path(__file__).resolve().parent)
