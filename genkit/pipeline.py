"""The base of all pipelines: `diffusers.DiffusionPipeline` with saving and loading that can be trusted; `load`.

A saved pipeline is a folder::

    manifest.json       sizes and SHA-256 of every file, versions, storage types; checked before anything is loaded
    model_index.json    diffusers' index; ``_genkit_class`` names the module of the pipeline class
    README.md           the model card
    <component>/        configuration (JSON) and weights (safetensors)
    adapter/<component>/  a LoRA adapter, where the component has one

Loading hashes first, imports modules of genkit, diffusers and transformers only, and reads safetensors, JSON and text
only. A file of another type (pickle, code), or one that the manifest does not list, is an error; nothing is executed.
"""

from __future__ import annotations

import inspect
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import diffusers
import numpy as np
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from genkit._adapters import adapter_kind, base_names, base_network, load_adapter, save_adapter
from genkit._card import render_card
from genkit._components import (
    allowed_class,
    check_names,
    class_entry,
    compute_dtype,
    is_listed,
    load_component,
    parse_dtype,
    refuse_file_types,
    save_component,
    unwrap_compiled,
)
from genkit.errors import CheckpointError, ConfigError, GenkitError
from genkit.serialization import load_json, recover_folder, save_json, save_tensors, verify_folder, write_folder

__all__ = ["GenkitPipeline", "load"]

INDEX, ADAPTERS = "model_index.json", "adapter"
_STORAGE = (None, torch.float32, torch.float16, torch.bfloat16)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
#: The files of a hub repository that are worth downloading; code and pickles are left where they are.
_HUB_FILES = ["*.json", "*.safetensors", "*.md", "*.txt", "*.model", "*.jinja", "*.png", "*.jpg", "*.svg", "*.csv"]


class GenkitPipeline(DiffusionPipeline):  # type: ignore[misc]  # diffusers is untyped
    """A `DiffusionPipeline` whose folder is verified, atomic, and free of pickle and code.

    Subclasses call ``self.register_modules(...)`` in ``__init__`` (parameters without default are components, and those
    in ``_optional_components``; parameters with default are plain values, kept by ``self.register_to_config(...)``) and
    may define ``model_card()``. Components are diffusers or transformers objects (`genkit._components`).
    """

    _callback_tensor_inputs: Sequence[str] = ()
    _card_facts: Mapping[str, Any] = {}

    # --- saving -------------------------------------------------------------------------------------------------------

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        card: Mapping[str, Any] | None = None,
        safe_serialization: bool = True,
    ) -> Path:
        """Write the pipeline as a folder that is whole or absent; an older genkit folder of that name is replaced.

        Args:
            save_directory: the folder.
            dtype: storage type of the parameters (torch.float16 halves the file). They are computed in the type that
                they have in memory now, also after loading.
            card: facts for the model card beside those of `model_card` (keys: `genkit._card.CARD_FACTS`).
            safe_serialization: must be True; it is there because diffusers has it.

        Raises:
            CheckpointError: a component is missing (it would be saved as null) or cannot be loaded again, weights are
                not finite or do not fit ``dtype``, or the disk refuses. What was saved before is unchanged.
        """
        if not safe_serialization:
            raise ConfigError("safe_serialization=False would write a pickle; genkit writes safetensors only.")
        if dtype not in _STORAGE:
            raise ConfigError(f"dtype={dtype}, expected one of {', '.join(str(d) for d in _STORAGE)}.")
        components = self._saved_components()
        facts = {**self.model_card(), **(card or {})}
        meta = {"kind": "pipeline", "class": type(self).__name__, "card": facts, "components": _facts(components)}

        def write(folder: Path) -> None:
            for name, component in components.items():
                _save(component, folder, name, dtype)
            save_json(folder / INDEX, self._index(components))
            (folder / "README.md").write_text(render_card(type(self).__name__, facts), encoding="utf-8")

        return write_folder(Path(save_directory), write, meta=meta)

    def _saved_components(self) -> dict[str, Any]:
        """Component name → object without its compiled wrapper, None only where the component is optional."""
        names, _ = _parameters(type(self))
        found = {name: unwrap_compiled(getattr(self, name, None)) for name in names}
        for name, component in found.items():
            if component is None and name not in self._optional_components:
                raise CheckpointError(f"{name} is None and would be saved as null; set pipe.{name} before saving.")
        return found

    def _index(self, components: Mapping[str, Any]) -> dict[str, Any]:
        module, name = class_entry(type(self), of="the pipeline")
        index: dict[str, Any] = {"_class_name": name, "_diffusers_version": diffusers.__version__}
        index["_genkit_class"] = module
        for part, component in components.items():
            entry = (None, None) if component is None else class_entry(type(base_network(component)), of=part)
            index[part] = list(entry)
        _, values = _parameters(type(self))
        return index | {key: self.config[key] for key in values if key in self.config}

    def model_card(self) -> dict[str, Any]:
        """Facts for the card (keys: `genkit._card.CARD_FACTS`); by default those of the folder it was loaded from."""
        return dict(self._card_facts)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        commit_message: str = "Upload pipeline",
        dtype: torch.dtype | None = None,
    ) -> str:
        """Save to a temporary folder and upload it; returns the address of the commit."""
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as parent:
            folder = self.save_pretrained(Path(parent) / "pipeline", dtype=dtype)
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message))

    # --- loading ------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        torch_dtype: torch.dtype | None = None,
        revision: str | None = None,
        token: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        **parts: Any,
    ) -> Self:
        """Load a folder written by `save_pretrained`, a zoo entry or a hub id, as the class that was saved.

        Args:
            pretrained_model_name_or_path: a folder, ``"zoo:name"``, or ``"owner/name"`` on the hub (downloaded first).
            torch_dtype: type of the parameters in memory; by default the one they had when saved (half storage does
                not count: such weights are computed in float32).
            revision, token, cache_dir, local_files_only: of the download.
            **parts: components or plain values that replace the stored ones; unknown names are an error.

        Raises:
            CheckpointError: the folder is damaged, foreign or names something that is not loaded; nothing was.
        """
        folder, links = _resolve(pretrained_model_name_or_path, revision, token, cache_dir, local_files_only)
        manifest = verify_folder(folder, links_within=links)
        refuse_file_types(manifest["files"])
        if INDEX not in manifest["files"]:
            raise CheckpointError(f"{folder}: has no {INDEX}, so it is not a pipeline; genkit verify says what it is.")
        index = load_json(folder / INDEX)
        target = _pipeline_class(index, cls, folder)
        # Building a network draws its initial weights; the caller's random state must not move.
        with torch.random.fork_rng(devices=[]):
            arguments = _load_arguments(target, index, manifest["meta"], folder, torch_dtype, parts)
        pipe: Self = target(**arguments)
        pipe.register_to_config(_name_or_path=str(folder))
        card = manifest["meta"].get("card")
        pipe._card_facts = card if isinstance(card, dict) else {}
        return pipe

    # --- calls and results --------------------------------------------------------------------------------------------

    def check_callback_inputs(self, names: Sequence[str]) -> None:
        """Raise `ConfigError` for a ``callback_on_step_end_tensor_inputs`` name that this pipeline does not offer."""
        check_names(names, self._callback_tensor_inputs, what=f"{type(self).__name__}: callback input")

    def write_samples(
        self, output: Any, out_dir: str | os.PathLike[str], *, call: Mapping[str, Any] | None = None
    ) -> Path:
        """Write a call's output: tensors to ``samples.safetensors``, other values to ``samples.json``.

        Args:
            output: the `BaseOutput` of a call (nested mappings of tensors are flattened with dots).
            out_dir: the folder, written whole or not at all.
            call: options of the call, kept in ``samples.json``.
        """
        tensors, values = _split_output(dict(output))
        facts = {
            "pipeline": type(self).__name__,
            "tensors": {k: {"shape": list(t.shape), "dtype": str(t.dtype)} for k, t in tensors.items()},
            "values": values,
            "call": dict(call or {}),
        }

        def write(folder: Path) -> None:
            save_tensors(folder / "samples.safetensors", tensors)
            save_json(folder / "samples.json", facts)

        return write_folder(Path(out_dir), write, meta={"kind": "samples", "pipeline": type(self).__name__})


def load(
    source: str | os.PathLike[str],
    *,
    torch_dtype: torch.dtype | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> GenkitPipeline:
    """Load any genkit pipeline as the class that was saved.

    Args:
        source: a folder, ``"zoo:returns-flow"``, or a hub id ``"owner/name"`` (downloaded, then loaded as a folder).
        torch_dtype: type of the parameters in memory, by default the one they had when saved.
        revision, token, cache_dir, local_files_only: of the download.
    """
    return GenkitPipeline.from_pretrained(
        source,
        torch_dtype=torch_dtype,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
    )


# --- parts of saving --------------------------------------------------------------------------------------------------


def _parameters(cls: type[DiffusionPipeline]) -> tuple[list[str], list[str]]:
    """Names of the components and of the plain values among the parameters of ``cls.__init__``."""
    signature = list(inspect.signature(cls.__init__).parameters.values())[1:]
    parameters = [p for p in signature if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p.name for p in parameters if p.default is p.empty or p.name in cls._optional_components]
    return required, [p.name for p in parameters if p.name not in required]


def _facts(components: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {"compute_dtype": compute_dtype(base_network(c)), "adapter": adapter_kind(c)}
        for name, c in components.items()
        if isinstance(c, nn.Module)
    }


def _save(component: Any, folder: Path, name: str, dtype: torch.dtype | None) -> None:
    if component is None:
        return
    network = base_network(component)
    rename = base_names(network) if adapter_kind(component) else None
    try:
        save_component(network, folder / name, dtype=dtype, rename=rename)
        if rename is not None:
            save_adapter(component, folder / ADAPTERS / name)
    except (GenkitError, OSError):
        raise
    except Exception as error:  # a component's own code failed: say which one
        raise CheckpointError(f"{name}: {type(component).__name__} could not be saved ({error}).") from error


def _split_output(output: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for key, value in output.items():
        if isinstance(value, Mapping):
            inner_tensors, inner_values = _split_output(value)
            tensors |= {f"{key}.{k}": t for k, t in inner_tensors.items()}
            values |= {f"{key}.{k}": v for k, v in inner_values.items()}
        elif isinstance(value, Tensor):
            tensors[key] = value
        elif isinstance(value, np.ndarray):
            tensors[key] = torch.from_numpy(value)
        elif value is not None:
            values[key] = value
    return tensors, values


# --- parts of loading -------------------------------------------------------------------------------------------------


def _resolve(
    source: str | os.PathLike[str],
    revision: str | None,
    token: str | None,
    cache_dir: str | os.PathLike[str] | None,
    local_files_only: bool,
) -> tuple[Path, Path | None]:
    """The local folder of ``source``, and the cache inside which its links may end."""
    text = os.fspath(source)
    if text.startswith("zoo:"):
        from genkit.zoo import zoo_path

        return zoo_path(text.removeprefix("zoo:")), None
    folder = Path(text).expanduser()
    if not folder.exists():
        recover_folder(folder)
    if folder.is_dir():
        return folder, None
    if not _HUB_ID.fullmatch(text) or isinstance(source, Path):
        raise CheckpointError(f"{text}: no such folder; expected a folder, 'zoo:<name>' or a hub id 'owner/name'.")
    return _download(text, revision, token, cache_dir, local_files_only)


def _download(
    repo_id: str,
    revision: str | None,
    token: str | None,
    cache_dir: str | os.PathLike[str] | None,
    local_files_only: bool,
) -> tuple[Path, Path]:
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(
            repo_id,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            allow_patterns=_HUB_FILES,
        )
    except Exception as error:  # network, permission and cache errors have no common base
        raise CheckpointError(
            f"{repo_id}: there is no such folder here, and it could not be downloaded as a hub id "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}). "
            "Check the path, the id and the connection, or download the repository and give its folder."
        ) from error
    folder = Path(path)
    return folder, folder.parents[1]  # <cache>/models--owner--name/snapshots/<commit>: links end in .../blobs


def _pipeline_class(index: Any, cls: type[GenkitPipeline], folder: Path) -> type[GenkitPipeline]:
    if not isinstance(index, dict) or "_genkit_class" not in index:
        raise CheckpointError(
            f"{folder}: was not saved by genkit (no _genkit_class in {INDEX}); "
            "a stock pipeline loads with diffusers.DiffusionPipeline.from_pretrained."
        )
    target = allowed_class(index["_genkit_class"], index.get("_class_name"), of=f"{folder}/{INDEX}")
    if not issubclass(target, GenkitPipeline):
        raise CheckpointError(f"{folder}: {target.__module__}.{target.__name__} is not a GenkitPipeline.")
    if not issubclass(target, cls):
        raise CheckpointError(f"{folder}: holds a {target.__name__}, not a {cls.__name__}; use genkit.load.")
    return target


def _load_arguments(
    target: type[GenkitPipeline],
    index: Mapping[str, Any],
    meta: Mapping[str, Any],
    folder: Path,
    torch_dtype: torch.dtype | None,
    parts: Mapping[str, Any],
) -> dict[str, Any]:
    """The constructor's arguments: every name, class and file is checked before the first component is built."""
    names, values = _parameters(target)
    check_names(parts, names + values, what=f"{target.__name__}.from_pretrained: argument")
    stored = {key: value for key, value in index.items() if not key.startswith("_")}
    _check_index(stored, names, values, folder)
    classes = {
        name: _component_class(stored.get(name), name, optional=name in target._optional_components, folder=folder)
        for name in names
        if name not in parts
    }
    arguments = {key: value for key, value in stored.items() if key in values} | dict(parts)
    facts = meta.get("components")
    for name, component_class in classes.items():
        fact = facts.get(name) if isinstance(facts, dict) else None
        built = None if component_class is None else _load(component_class, folder, name, fact, torch_dtype)
        arguments[name] = built
    return arguments


def _check_index(stored: Mapping[str, Any], names: list[str], values: list[str], folder: Path) -> None:
    try:
        check_names(stored, names + values, what=f"{folder}/{INDEX}: entry")
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def _component_class(entry: Any, name: str, *, optional: bool, folder: Path) -> type | None:
    of = f"{folder}/{INDEX}: {name}"
    if not is_listed(entry):
        raise CheckpointError(f"{of}: expected [module, class], got {entry!r}.")
    if entry != [None, None]:
        return allowed_class(entry[0], entry[1], of=of)
    if not optional:
        raise CheckpointError(f"{of} was saved as null, but the pipeline needs it; pass {name}=... to load it.")
    return None


def _load(component_class: type, folder: Path, name: str, fact: Any, torch_dtype: torch.dtype | None) -> Any:
    fact = fact if isinstance(fact, dict) else {}
    dtype = torch_dtype or parse_dtype(fact.get("compute_dtype"), of=f"{folder}: {name}")
    component = load_component(component_class, folder / name, dtype=dtype, keep_buffers=torch_dtype is None)
    kind = fact.get("adapter")
    if kind is None:
        return component
    if kind not in ("wrapped", "injected"):
        raise CheckpointError(f"{folder}: {name} has an adapter of kind {kind!r}, expected 'wrapped' or 'injected'.")
    return load_adapter(component, folder / ADAPTERS / name, kind=kind)
