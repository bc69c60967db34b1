"""What calls of pipelines that walk straight have in common: their checks, and diffusers' callback."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from genkit._checks import checked_changes
from genkit.errors import ConfigError

__all__ = ["adapted_callback", "check_call", "check_labels", "check_latents", "walk_steps"]


def check_call(num_samples: Any, output_type: str) -> None:
    """Refuses a count that is none, or an unknown kind of output."""
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 0:
        raise ConfigError(f"num_samples={num_samples!r}; expected an integer, at least 0")
    if output_type not in ("pt", "np"):
        raise ConfigError(f"output_type={output_type!r}; expected 'pt' or 'np'")


def check_latents(latents: Any, shape: Sequence[int]) -> None:
    """Refuses another shape, or noise that is not finite."""
    if not isinstance(latents, Tensor) or tuple(latents.shape) != tuple(shape):
        got = f"shape {tuple(latents.shape)}" if isinstance(latents, Tensor) else f"type {type(latents).__name__}"
        raise ConfigError(f"latents has {got}; expected {tuple(shape)}, a tensor of unit noise")
    if not bool(torch.isfinite(latents).all()):
        raise ConfigError("latents holds NaN or infinity; expected unit noise")


def check_labels(class_labels: Tensor | Sequence[int] | None, num_samples: int, classes: int) -> None:
    """Refuses labels where the network has none, their absence where it has, and labels that do not fit."""
    if classes == 0 and class_labels is not None:
        raise ConfigError("class_labels was given, but this network was trained without labels; drop the argument")
    if classes and class_labels is None:
        raise ConfigError(f"this network is class-conditional; give class_labels, {num_samples} of 0 … {classes - 1}")
    if class_labels is None:
        return
    labels = torch.as_tensor(class_labels)
    if labels.is_floating_point() or labels.is_complex() or labels.shape != (num_samples,):
        raise ConfigError(
            f"class_labels has shape {tuple(labels.shape)} and dtype {labels.dtype}; expected ({num_samples},) integers"
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ConfigError(
            f"class_labels holds {int(labels.min())} to {int(labels.max())}; expected classes 0 … {classes - 1}"
        )


def walk_steps(num_inference_steps: int | None, times: Sequence[float] | Tensor | None, default: int) -> int | None:
    """The number of steps, or None where ``times`` give it: a whole walk, from noise at 1 to data at 0."""
    if times is None:
        return default if num_inference_steps is None else num_inference_steps
    if num_inference_steps is not None:
        raise ConfigError(f"both times and num_inference_steps={num_inference_steps} were given; give one of the two")
    ends = [float(v) for v in (times[0], times[-1])] if len(times) else []
    if ends != [1.0, 0.0]:
        raise ConfigError(f"times run from {ends[:1]} to {ends[1:]}; expected from 1 (noise) to 0 (data)")
    return None


def adapted_callback(
    pipe: Any, callback: Callable[..., Any] | None, inputs: Sequence[str]
) -> Callable[..., Any] | None:
    """diffusers' callback in the walk's terms."""
    if callback is None:
        return None

    def adapted(step: int, t: float, tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        known = {"latents": tensors["sample"], "x0": tensors["x0"]}
        changed = callback(pipe, step, t * pipe.scheduler.num_train_timesteps, {name: known[name] for name in inputs})
        changed = checked_changes(changed, pipe._callback_tensor_inputs)
        return {"sample": changed["latents"]} if "latents" in changed else None

    return adapted
