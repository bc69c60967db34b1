"""What this machine has: versions, device, optional backends, and what each method would run on."""

from __future__ import annotations

import importlib.util
import os
import platform

from genkit.registry import METHODS, method_names
from genkit.serialization import installed_versions

__all__ = ["report"]

#: package → (extra that installs it, what it does).
_OPTIONAL = {
    "transformers": ("lm", "language models and text encoders"),
    "peft": ("lm", "LoRA adapters"),
    "pymatgen": ("crystals", "crystal structures"),
    "spglib": ("crystals", "space groups"),
    "moyopy": ("crystals", "space groups, faster"),
    "chgnet": ("crystals", "stability from a machine-learned potential"),
    "pysiglib": ("pysiglib", "a log-signature backend"),
    "signatory": ("signatory", "a log-signature backend"),
    "xformers": ("xformers", "an attention backend, CUDA only"),
    "pandas": ("finance", "for your own tables of prices; genkit reads CSV files without it"),
    "scoringrules": ("weather", "forecast scores to compare with"),
    "tensorboard": ("track", "a tracker"),
    "wandb": ("track", "a tracker"),
}
_NEEDS = {
    "crystal_tree_search": ("pymatgen", "spglib", "moyopy", "chgnet"),
    "diffusion_drf": ("transformers", "peft"),
    "block_diffusion": ("transformers",),
}


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return f"cuda ({torch.cuda.get_device_name(0)}, {torch.cuda.device_count()} visible)"
    if torch.backends.mps.is_available():
        return "mps"
    return f"cpu ({os.cpu_count()} cores, {torch.get_num_threads()} threads in use)"


def _method_line(name: str, device: str) -> str:
    if name not in method_names():
        return f"  {name:<22}not in this installation"
    missing = [package for package in _NEEDS.get(name, ()) if not _has(package)]
    if missing:
        extra = _OPTIONAL[missing[0]][0]
        return f"  {name:<22}needs {', '.join(missing)}: pip install 'genkit-diffusion[{extra}]'"
    return f"  {name:<22}runs on {device.partition(' ')[0]}{_backend(name, device)}"


def _backend(name: str, device: str) -> str:
    if name == "heavy_tailed_flow":
        others = [p for p in ("pysiglib", "signatory") if _has(p)]
        return f", log-signatures built in{' (also here: ' + ', '.join(others) + ')' if others else ''}"
    if name == "block_diffusion":
        attention = "FlexAttention" if device.startswith("cuda") else "scaled dot products with a dense mask"
        return f", attention by {attention}"
    return ""


def report() -> str:
    """The report as text."""
    device = _device()
    lines = [f"genkit on {platform.platform()}", "", "versions"]
    lines += [f"  {name:<22}{version}" for name, version in installed_versions().items()]
    lines += ["", f"device                  {device}", "", "optional packages"]
    for package, (extra, purpose) in _OPTIONAL.items():
        state = "here" if _has(package) else f"absent ([{extra}])"
        lines.append(f"  {package:<22}{state:<22}{purpose}")
    lines += ["", "methods", *(_method_line(name, device) for name in METHODS)]
    return "\n".join(lines)
