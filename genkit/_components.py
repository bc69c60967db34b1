"""A pipeline's components on disk: which classes may be loaded, and how one component is written and read.

A folder is data from somewhere, so it only ever *names* classes: the module must lie in `ALLOWED_PACKAGES`, be
importable already, and define a subclass of a known base. Files are safetensors, JSON and text; others are refused.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from genkit.errors import CheckpointError, ConfigError, GenkitError, nearest
from genkit.serialization import load_json, load_tensors, save_json, save_tensors

__all__ = [
    "ALLOWED_PACKAGES",
    "FILE_TYPES",
    "allowed_class",
    "check_names",
    "class_entry",
    "compute_dtype",
    "is_listed",
    "load_component",
    "parse_dtype",
    "refuse_file_types",
    "save_component",
    "unwrap_compiled",
]

#: A module named in a saved folder is imported only when it is one of these packages or lies inside one.
ALLOWED_PACKAGES: tuple[str, ...] = ("genkit", "diffusers", "transformers")

#: What a pipeline folder may hold. Pickles (.bin, .pt, .pkl, .ckpt), code (.py, .so) and unknown types are refused.
FILE_TYPES = frozenset({".safetensors", ".json", ".md", ".txt", ".model", ".jinja", ".png", ".jpg", ".svg", ".csv"})

_TRANSFORMERS_BASES = (
    "PreTrainedModel",
    "PreTrainedTokenizerBase",
    "ProcessorMixin",
    "ImageProcessingMixin",
    "FeatureExtractionMixin",
)
_MODULE = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z][A-Za-z0-9_]*)*")
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
_LOADED_FROM = frozenset({"_name_or_path", "_pre_quantization_dtype", "is_local", "local_files_only"})
#: Loaders shard above their limit; one file a component keeps the key and dtype rewriting below simple.
_ONE_FILE = 2**62


# --- which classes ----------------------------------------------------------------------------------------------------


def _is_allowed(module: str) -> bool:
    return bool(_MODULE.fullmatch(module)) and module.partition(".")[0] in ALLOWED_PACKAGES


def allowed_class(module: Any, name: Any, *, of: str) -> type:
    """The class ``name`` of ``module``, imported only if the module is allowed.

    Args:
        module, name: texts from a saved folder.
        of: what they describe, for the error.
    """
    if not isinstance(module, str) or not isinstance(name, str) or not name.isidentifier():
        raise CheckpointError(
            f"{of}: expected [module, class], got [{module!r}, {name!r}]; the folder is not genkit's."
        )
    if not _is_allowed(module):
        raise CheckpointError(
            f"{of}: module {module!r} is not loaded; only modules of {', '.join(ALLOWED_PACKAGES)} are. "
            "Code is never run from a data file: build that component yourself and pass it by name."
        )
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise CheckpointError(f"{of}: module {module!r} cannot be imported ({error}).") from error
    if not isinstance(found, type) or not _is_allowed(found.__module__):
        raise CheckpointError(f"{of}: {module}.{name} is not a class of {', '.join(ALLOWED_PACKAGES)}.")
    return found


def class_entry(cls: type, *, of: str) -> tuple[str, str]:
    """``(module, class)`` as the index stores it: the package alone for what diffusers and transformers export.

    Raises `CheckpointError` for a class that could not be loaded again.
    """
    root = cls.__module__.partition(".")[0]
    if not _is_allowed(cls.__module__):
        raise CheckpointError(
            f"{of}: {cls.__module__}.{cls.__qualname__} could not be loaded again, since only classes of "
            f"{', '.join(ALLOWED_PACKAGES)} are. Keep it out of the pipeline or pass it at load."
        )
    exported = root != "genkit" and getattr(importlib.import_module(root), cls.__name__, None) is cls
    module = root if exported else cls.__module__
    if getattr(importlib.import_module(module), cls.__name__, None) is not cls:
        raise CheckpointError(f"{of}: class {cls.__qualname__} must be defined at the top level of {cls.__module__}.")
    return module, cls.__name__


def _is_transformers(cls: type) -> bool:
    if not any(base.__module__.partition(".")[0] == "transformers" for base in cls.__mro__):
        return False
    import transformers

    bases = (getattr(transformers, name, None) for name in _TRANSFORMERS_BASES)
    return any(base is not None and issubclass(cls, base) for base in bases)


def _check_kind(cls: type, *, of: str) -> None:
    from diffusers import DiffusionPipeline

    plain = issubclass(cls, ConfigMixin) and not issubclass(cls, DiffusionPipeline)
    if not plain and not _is_transformers(cls):
        raise CheckpointError(
            f"{of}: {cls.__module__}.{cls.__qualname__} cannot be saved and loaded; expected a diffusers ModelMixin or "
            "ConfigMixin (schedulers too) or a transformers model, tokenizer or processor."
        )


def unwrap_compiled(component: Any) -> Any:
    """The module inside a `torch.compile` wrapper, else the component itself."""
    return getattr(component, "_orig_mod", component)


# --- files ------------------------------------------------------------------------------------------------------------


def refuse_file_types(files: Iterable[str]) -> None:
    """Raise `CheckpointError` for the first listed file that is not safetensors, JSON, text or a picture."""
    for name in files:
        if Path(name).suffix.lower() not in FILE_TYPES and Path(name).name not in {"LICENSE", "NOTICE"}:
            raise CheckpointError(
                f"{name}: files of this type are not loaded (pickles and code can run anything); "
                f"expected {', '.join(sorted(FILE_TYPES))}."
            )


def _refuse_code_references(folder: Path) -> None:
    """transformers configurations can name remote code or attention kernels to download; none of ours does."""
    for path in sorted(folder.rglob("*.json")):
        for key, value in _entries(load_json(path)):
            if key == "auto_map" or ("attn_implementation" in key and "/" in str(value)):
                raise CheckpointError(f"{path}: {key!r} names code outside the installed packages; it is not loaded.")


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """All key-value pairs of nested JSON."""
    if isinstance(value, dict):
        yield from value.items()
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _entries(entry)


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


# --- one component ----------------------------------------------------------------------------------------------------


def compute_dtype(component: Any) -> str | None:
    """The widest floating dtype among a network's parameters as text, or None when there is none."""
    if not isinstance(component, nn.Module):
        return None
    dtypes = {p.dtype for p in component.parameters() if p.is_floating_point()}
    result = None
    for dtype in dtypes:
        result = dtype if result is None else torch.promote_types(result, dtype)
    return None if result is None else str(result).removeprefix("torch.")


def parse_dtype(name: Any, *, of: str) -> torch.dtype | None:
    """The dtype that `compute_dtype` wrote."""
    if name is None:
        return None
    if not isinstance(name, str) or name not in _DTYPES:
        raise CheckpointError(f"{of}: dtype {name!r}, expected one of {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def save_component(
    component: Any,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    rename: Mapping[str, str | None] | None = None,
) -> None:
    """Write one component into ``folder``.

    Args:
        component: diffusers ModelMixin / ConfigMixin, or a transformers model, tokenizer or processor.
        dtype: storage type of the floating *parameters* (buffers keep theirs); None keeps the type in memory.
        rename: stored name of each tensor whose name on disk differs, None for tensors to leave out.
    """
    of = folder.name
    _check_kind(type(component), of=of)
    if isinstance(component, nn.Module):
        _refuse_nonfinite(component, of=of)
    _write_component(component, folder)
    _forget_places(folder)
    if isinstance(component, nn.Module) and (dtype is not None or rename):
        _rewrite_weights(component, folder, dtype, rename or {})


def _write_component(component: Any, folder: Path) -> None:
    if isinstance(component, ModelMixin):
        component.save_pretrained(folder, safe_serialization=True, max_shard_size=_ONE_FILE)
    elif isinstance(component, ConfigMixin):
        component.save_config(folder)
    else:  # transformers: networks take a shard size, tokenizers and processors do not
        options = {"max_shard_size": _ONE_FILE} if isinstance(component, nn.Module) else {}
        with _without_bars():
            component.save_pretrained(folder, **options)


@contextmanager
def _without_bars() -> Iterator[None]:
    """transformers draws a progress bar a component, also for one that takes a millisecond."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _forget_places(folder: Path) -> None:
    """Drop what loaders note about where and how a component was loaded: saved again, it must give the same file."""
    for path in sorted(folder.glob("*.json")):
        value = load_json(path)
        if isinstance(value, dict) and value.keys() & _LOADED_FROM:
            save_json(path, {key: entry for key, entry in value.items() if key not in _LOADED_FROM})


def _refuse_nonfinite(module: nn.Module, *, of: str) -> None:
    for name, parameter in module.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise CheckpointError(
                f"{of}: parameter {name} holds NaN or infinity; not saved. Return to healthy weights."
            )


def _rewrite_weights(
    module: nn.Module, folder: Path, dtype: torch.dtype | None, rename: Mapping[str, str | None]
) -> None:
    parameters = {name for name, p in module.named_parameters() if p.is_floating_point()}
    for path in _weight_files(folder):
        stored: dict[str, torch.Tensor] = {}
        for name, tensor in load_tensors(path).items():
            target = rename.get(name, name)
            if target is not None:
                narrow = dtype is not None and name in parameters
                stored[target] = _narrow(tensor, dtype, f"{folder.name}: {name}") if narrow else tensor
        save_tensors(path, stored)


def _narrow(tensor: torch.Tensor, dtype: torch.dtype | None, name: str) -> torch.Tensor:
    result = tensor.to(dtype)
    if not bool(torch.isfinite(result).all()):
        raise CheckpointError(
            f"{name}: values up to {tensor.abs().max().item():.3g} do not fit {dtype}; save as bfloat16 or float32."
        )
    return result


def load_component(cls: type, folder: Path, *, dtype: torch.dtype | None, keep_buffers: bool) -> Any:
    """Read one component that `save_component` wrote; weights must match the network name by name.

    Args:
        cls: its class, from `allowed_class`.
        dtype: the parameters' type in memory.
        keep_buffers: give buffers their stored type back (loaders cast everything to ``dtype``).
    """
    of = folder.name
    _check_kind(cls, of=of)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: the component's folder is missing.")
    _refuse_code_references(folder)
    try:
        return _load(cls, folder, dtype, keep_buffers)
    except GenkitError:
        raise
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{of}: {cls.__name__} could not be loaded from {folder} ({error}).") from error


def _load(cls: Any, folder: Path, dtype: torch.dtype | None, keep_buffers: bool) -> Any:
    if not issubclass(cls, nn.Module):
        if issubclass(cls, ConfigMixin):
            return cls.from_config(cls.load_config(folder, local_files_only=True))
        return cls.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not _weight_files(folder):
        return _without_weights(cls, folder)
    options: dict[str, Any] = {"use_safetensors": True, "local_files_only": True, "output_loading_info": True}
    if issubclass(cls, ModelMixin):
        module, info = cls.from_pretrained(folder, torch_dtype=dtype, **options)
    else:
        with _without_bars():
            module, info = cls.from_pretrained(folder, dtype=dtype, trust_remote_code=False, **options)
    _check_keys(info, of=folder.name)
    if keep_buffers:
        _restore_buffers(module, folder)
    return module.eval()


def _without_weights(cls: Any, folder: Path) -> Any:
    module = cls.from_config(cls.load_config(folder, local_files_only=True)) if issubclass(cls, ConfigMixin) else None
    if module is None or module.state_dict():
        raise CheckpointError(f"{folder.name}: {cls.__name__} has weights, but the folder holds no .safetensors file.")
    return module.eval()


def _check_keys(info: Mapping[str, Any], *, of: str) -> None:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in info.get(kind) or ())
        if keys:
            shown = ", ".join(keys[:3]) + (" …" if len(keys) > 3 else "")
            raise CheckpointError(
                f"{of}: {len(keys)} {kind.replace('_', ' ')} ({shown}); the weights belong to another network."
            )


def _restore_buffers(module: nn.Module, folder: Path) -> None:
    from safetensors import safe_open

    buffers = dict(module.named_buffers())
    for path in _weight_files(folder):
        with safe_open(str(path), framework="pt") as stored:
            for name in buffers.keys() & set(stored.keys()):
                owner, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(owner), leaf, stored.get_tensor(name).to(buffers[name].device))


def is_listed(value: Any) -> TypeGuard[list[str | None]]:
    """Whether an index entry has the form ``[module, class]`` (or ``[null, null]``)."""
    return isinstance(value, list) and len(value) == 2 and all(v is None or isinstance(v, str) for v in value)


def check_names(given: Iterable[str], known: Iterable[str], *, what: str) -> None:
    """Raise `ConfigError` for the first unknown name."""
    known = list(known)
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{what} {name!r} is not known; expected {', '.join(known) or 'none'}.{nearest(name, known)}"
            )
