"""The methods by name. Their modules are imported when a method is used, so the core never depends on one of them."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from genkit.errors import ConfigError, nearest

__all__ = ["METHODS", "method_module", "method_names"]

#: method name → package. A method's package has the modules ``config``, ``evaluate``, ``demo`` and ``pipeline``.
METHODS = {
    "heavy_tailed_flow": "genkit.pipelines.heavy_tailed_flow",
    "rmmd": "genkit.pipelines.rmmd",
    "diffusion_drf": "genkit.pipelines.diffusion_drf",
    "crystal_tree_search": "genkit.pipelines.crystal_tree_search",
    "block_diffusion": "genkit.pipelines.block_diffusion",
}


def method_names() -> list[str]:
    """The methods that this installation contains, in the order of `METHODS`."""
    return [name for name, package in METHODS.items() if importlib.util.find_spec(package) is not None]


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
