"""The methods by name. Their modules are imported when a method is used, so the core never depends on one of them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from genkit.errors import ConfigError, nearest

__all__ = ["METHODS", "SAMPLE_FILES", "method_module", "method_names", "sample_judge", "sample_method"]

#: method name → package. A method's package has the modules ``config``, ``evaluate``, ``demo`` and ``pipeline``.
METHODS = {
    "heavy_tailed_flow": "genkit.pipelines.heavy_tailed_flow",
    "rmmd": "genkit.pipelines.rmmd",
    "diffusion_drf": "genkit.pipelines.diffusion_drf",
    "crystal_tree_search": "genkit.pipelines.crystal_tree_search",
    "block_diffusion": "genkit.pipelines.block_diffusion",
}

#: method name → endings of files that are its samples and nobody else's; its package has a module ``files``.
SAMPLE_FILES = {"crystal_tree_search": (".extxyz", ".xyz", ".cif", ".vasp", ".poscar")}


def method_names() -> list[str]:
    """The methods that this installation contains, in the order of `METHODS`."""
    return [name for name, package in METHODS.items() if _is_complete(package)]


def _is_complete(package: str) -> bool:
    """Whether a method is here and can be configured."""
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(f"{package}.config") is not None


def method_module(name: str, part: str) -> ModuleType:
    """Import ``genkit.pipelines.<name>.<part>``.

    Raises:
        ConfigError: the method is unknown (the message names the nearest one) or has no such part.
    """
    known = method_names()
    if name not in known:
        raise ConfigError(f"method {name!r} is not known; expected one of {', '.join(known)}.{nearest(name, known)}")
    module = f"{METHODS[name]}.{part}"
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"method {name!r} has no part {part!r} (module {module}).")
    return importlib.import_module(module)


def sample_method(path: str | Path) -> str | None:
    """The method whose samples a file is by its ending, or None."""
    ending = Path(path).suffix.lower()
    return next((name for name, endings in SAMPLE_FILES.items() if ending in endings), None)


def sample_judge(name: str) -> Callable[..., str]:
    """The function ``evaluate_samples(path, **options)`` of a method, which measures a file of samples.

    Raises:
        ConfigError: the method is unknown, or does not judge files.
    """
    module = method_module(name, "files" if name in SAMPLE_FILES else "evaluate")
    judge: Callable[..., str] | None = getattr(module, "evaluate_samples", None)
    if judge is None:
        raise ConfigError(f"method {name!r} does not judge files of samples; give its CONFIG instead.")
    return judge
