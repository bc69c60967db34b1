"""LoRA adapters beside their base: ``adapter/<component>/`` holds the low-rank tensors and their configuration.

The base is stored with its original tensor names, so it loads without peft; peft is needed only where an adapter is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from genkit._components import check_names
from genkit.errors import CheckpointError, MissingExtraError
from genkit.serialization import load_json, load_tensors, save_json, save_tensors

__all__ = ["adapter_kind", "base_names", "base_network", "load_adapter", "save_adapter"]

CONFIG, WEIGHTS, NAME = "adapter_config.json", "adapter_model.safetensors", "default"

#: The only LoraConfig fields that are stored and read back. Others reach into further packages (``megatron_core`` is
#: imported by name), so a folder that sets one is refused.
_FIELDS = frozenset(
    {
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "fan_in_fan_out",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "lora_dropout",
        "modules_to_save",
        "r",
        "rank_pattern",
        "target_modules",
        "task_type",
        "use_dora",
        "use_rslora",
    }
)
#: Bookkeeping of peft without influence on the network's output once its tensors are loaded.
_UNUSED = frozenset({"base_model_name_or_path", "inference_mode", "init_lora_weights", "peft_version", "revision"})


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("This pipeline has a LoRA adapter: install genkit-diffusion[lm] to load it.") from error
    return peft


def adapter_kind(component: Any) -> str | None:
    """``"wrapped"`` for a PeftModel, ``"injected"`` for a network with LoRA layers inside, None without adapter."""
    if not isinstance(component, nn.Module) or not getattr(component, "peft_config", None):
        return None
    return "wrapped" if isinstance(component, _peft().PeftModel) else "injected"


def base_network(component: Any) -> Any:
    """The network that carries the LoRA layers (the component itself unless it is a PeftModel)."""
    return component.get_base_model() if adapter_kind(component) == "wrapped" else component


def base_names(network: nn.Module) -> dict[str, str | None]:
    """Tensor name now → name in the plain base network; None for the adapter's own tensors."""
    names: dict[str, str | None] = {}
    for name in network.state_dict():
        if ".lora_" in name or ".modules_to_save." in name:
            names[name] = None
        else:
            names[name] = name.replace(".base_layer.", ".").replace(".original_module.", ".")
    return {name: target for name, target in names.items() if target != name}


def _config_dict(component: Any, *, of: str) -> dict[str, Any]:
    configs: Mapping[str, Any] = component.peft_config
    if set(configs) != {NAME} or type(configs[NAME]).__name__ != "LoraConfig":
        got = {name: type(config).__name__ for name, config in configs.items()}
        raise CheckpointError(
            f"{of}: adapters {got}; expected one LoraConfig named {NAME!r}. Merge or rename the others."
        )
    config, default = configs[NAME].to_dict(), type(configs[NAME])().to_dict()
    for key, value in config.items():
        if key not in _FIELDS | _UNUSED | {"peft_type", "auto_mapping"} and value != default[key]:
            raise CheckpointError(f"{of}: LoraConfig field {key}={value!r} is not stored by genkit; use its default.")
    fields = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items() if k in _FIELDS}
    return {"peft_type": "LORA", **{k: getattr(v, "value", v) for k, v in fields.items()}}


def save_adapter(component: Any, folder: Path) -> None:
    """Write the adapter of ``component`` as ``adapter_config.json`` and ``adapter_model.safetensors``."""
    folder.mkdir(parents=True)
    save_json(folder / CONFIG, _config_dict(component, of=folder.name))
    save_tensors(folder / WEIGHTS, _tensors(component))


def _tensors(component: nn.Module) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = _peft().get_peft_model_state_dict(component, save_embedding_layers=False)
    return tensors


def load_adapter(base: nn.Module, folder: Path, *, kind: str) -> nn.Module:
    """``base`` with the saved adapter, wrapped or injected as it was; every tensor must match by name and shape."""
    peft = _peft()
    values = load_json(folder / CONFIG)
    if not isinstance(values, dict) or values.pop("peft_type", None) != "LORA":
        raise CheckpointError(f"{folder / CONFIG}: expected a mapping with peft_type LORA.")
    check_names(values, _FIELDS, what=f"{folder / CONFIG}: LoRA field")
    devices: list[int] = []  # peft initialises the new layers from the global generator, which must stay untouched
    with torch.random.fork_rng(devices=devices):
        config = peft.LoraConfig(**values)
        build = peft.get_peft_model if kind == "wrapped" else None
        model = build(base, config) if build else peft.inject_adapter_in_model(config, base)
    stored, expected = load_tensors(folder / WEIGHTS), _tensors(model)
    _check_match(stored, expected, of=str(folder / WEIGHTS))
    peft.set_peft_model_state_dict(model, stored)
    result: nn.Module = model.eval()
    return result


def _check_match(stored: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, of: str) -> None:
    for name in sorted(stored.keys() | expected.keys()):
        got, want = (tuple(t[name].shape) if name in t else None for t in (stored, expected))
        if got != want:
            raise CheckpointError(f"{of}: {name} has shape {got}, the network expects {want}; it fits another base.")
