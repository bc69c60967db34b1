"""The reward protocol: values, validity and gradients, with invalid samples masked and counted, never scored as 0."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from genkit.errors import ConfigError, nearest

__all__ = ["Context", "FunctionReward", "Reward", "RewardOutput", "Sample", "batch_size", "reward_output"]

Sample = Tensor | Mapping[str, Tensor]
Context = Mapping[str, Any]


@dataclass(frozen=True)
class RewardOutput:
    """What a reward says about a batch.

    Args:
        values: (B,) or (B, n_objectives), higher is better; NaN where invalid, so that a forgotten mask is loud.
        valid: (B,) bool.
        logs: named scalars for the trackers.
    """

    values: Tensor
    valid: Tensor
    logs: Mapping[str, Tensor | float] = field(default_factory=dict)

    @property
    def invalid_count(self) -> int:
        """How many samples could not be judged."""
        return int((~self.valid).sum())

    def filled(self, value: float = 0.0) -> Tensor:
        """The values with ``value`` where invalid: the term that drops out of a sum (use `mean` for averages)."""
        mask = self.valid if self.values.ndim == 1 else self.valid.unsqueeze(1)
        return torch.where(mask, self.values, torch.full_like(self.values, value))

    def mean(self) -> Tensor:
        """Mean over the valid samples, () or (n_objectives,); NaN when none is valid."""
        return self.filled().sum(dim=0) / self.valid.sum()


def reward_output(
    values: Tensor, valid: Tensor | None = None, logs: Mapping[str, Tensor | float] | None = None
) -> RewardOutput:
    """A `RewardOutput` in which every value that is not finite, or not ``valid``, is masked.

    Args:
        values: floating point, (B,) or (B, n_objectives).
        valid: (B,) bool; by default all that are finite.

    Raises:
        ConfigError: values or mask of another kind or shape.
    """
    if not isinstance(values, Tensor):
        raise ConfigError(f"reward values are {type(values).__name__}, expected a tensor (B,), one value a sample.")
    if not values.is_floating_point():
        raise ConfigError(
            f"reward values are {values.dtype}, expected floating point (NaN marks invalid): add .float()."
        )
    if values.ndim not in (1, 2):
        raise ConfigError(f"reward values have shape {tuple(values.shape)}, expected (B,) or (B, n_objectives).")
    finite = torch.isfinite(values) if values.ndim == 1 else torch.isfinite(values).all(dim=1)
    if valid is not None and valid.shape != finite.shape:
        raise ConfigError(f"reward mask has shape {tuple(valid.shape)}, expected {tuple(finite.shape)}.")
    mask = finite if valid is None else finite & valid.bool()
    shown = mask if values.ndim == 1 else mask.unsqueeze(1)
    masked = torch.where(shown, values, torch.full_like(values, float("nan")))
    return RewardOutput(masked, mask, dict(logs or {}))


class Reward(ABC):
    """Judges samples. Subclasses define `values`; calling the reward adds the mask.

    ``differentiable`` says that gradients of the values with respect to the sample exist and mean something.
    """

    differentiable: bool = False

    @abstractmethod
    def values(self, sample: Sample, context: Context | None) -> Tensor | RewardOutput:
        """Values (B,) or (B, n_objectives) of ``sample`` (B, *) (ensembles: (B, M, *) → (B,)).

        A value that cannot be told is NaN. ``context`` has one entry per sample: targets, labels, prompts.
        A batch-level reward returns contributions whose mean over the batch is the reward.
        """

    def __call__(self, sample: Sample, context: Context | None = None) -> RewardOutput:
        """The values of ``sample`` with their mask; the gradient flows through when the reward is differentiable."""
        with torch.set_grad_enabled(self.differentiable and torch.is_grad_enabled()):
            result = self.values(sample, context)
        output = result if isinstance(result, RewardOutput) else _named_output(self, result)
        expected = batch_size(sample)
        if output.values.shape[0] != expected:
            raise ConfigError(f"{self}: {output.values.shape[0]} values for {expected} samples; expected one a sample.")
        return output

    def value_and_grad(self, sample: Sample, context: Context | None = None) -> tuple[RewardOutput, Any]:
        """Values, and the gradient of each value with respect to its own sample.

        Returns:
            The detached output, and a gradient of the sample's structure: ∂(Σ_b r_b)/∂x, which is ∂r_b/∂x_b where
            samples do not interact. Invalid samples have gradient 0; one whose gradient is not finite becomes invalid.

        Raises:
            ConfigError: the reward is not differentiable, has several objectives, or its graph is cut.
        """
        if not self.differentiable:
            raise ConfigError(f"{self} is not differentiable; use it where only values are needed (search, ranking).")
        leaves = _leaves(sample)
        with torch.enable_grad():
            output = self(leaves if isinstance(sample, Mapping) else leaves[""], context)
            gradients = _gradients(self, output, leaves)
        return _masked(output, gradients, single=not isinstance(sample, Mapping))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _named_output(reward: Reward, values: Tensor) -> RewardOutput:
    try:
        return reward_output(values)
    except ConfigError as error:
        raise ConfigError(f"{reward}: {error}") from error


def batch_size(sample: Sample) -> int:
    """B of a tensor (B, *) or of a mapping of such tensors, which must agree."""
    tensors = dict(sample) if isinstance(sample, Mapping) else {"sample": sample}
    sizes = {key: value.shape[0] for key, value in tensors.items()}
    if len(set(sizes.values())) != 1:
        raise ConfigError(f"the parts of a sample need one batch size, got {sizes}.")
    return next(iter(sizes.values()))


def _leaves(sample: Sample) -> dict[str, Tensor]:
    tensors = dict(sample) if isinstance(sample, Mapping) else {"": sample}
    return {key: v.detach().requires_grad_(v.is_floating_point()) for key, v in tensors.items()}


def _gradients(reward: Reward, output: RewardOutput, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if output.values.ndim != 1:
        raise ConfigError(f"{reward} has {output.values.shape[1]} objectives; combine them into one before a gradient.")
    total = output.filled().sum()
    if not total.requires_grad:
        raise ConfigError(f"{reward} says it is differentiable, but its values carry no gradient (detached inside?).")
    inputs = {key: leaf for key, leaf in leaves.items() if leaf.requires_grad}
    found = torch.autograd.grad(total, list(inputs.values()), allow_unused=True)
    gradients = dict(zip(inputs, found, strict=True))
    return {
        key: torch.zeros_like(leaf) if gradients.get(key) is None else gradients[key] for key, leaf in leaves.items()
    }


def _masked(output: RewardOutput, gradients: dict[str, Tensor], *, single: bool) -> tuple[RewardOutput, Any]:
    finite = torch.stack([torch.isfinite(g).reshape(g.shape[0], -1).all(dim=1) for g in gradients.values()]).all(dim=0)
    result = reward_output(output.values.detach(), output.valid & finite, output.logs)
    kept = {key: torch.where(_like(result.valid, g), g, torch.zeros_like(g)) for key, g in gradients.items()}
    return result, kept[""] if single else kept


def _like(mask: Tensor, tensor: Tensor) -> Tensor:
    return mask.reshape(-1, *(1,) * (tensor.ndim - 1))


class FunctionReward(Reward):
    """A plain function as a reward: a black box, or a differentiable one when it says so.

    Args:
        function: (sample, context) → values (B,) or (B, n_objectives); NaN where it cannot tell.
        differentiable: whether its gradient may be used.
        name: for logs and errors.
    """

    def __init__(
        self, function: Callable[[Sample, Context | None], Tensor], *, differentiable: bool = False, name: str = ""
    ) -> None:
        self.function = function
        self.differentiable = differentiable
        self.name = name or getattr(function, "__name__", type(function).__name__)

    def values(self, sample: Sample, context: Context | None) -> Tensor:
        return self.function(sample, context)

    def __repr__(self) -> str:
        return f"FunctionReward({self.name})"


def context_entry(context: Context | None, key: str, size: int, *, of: Reward) -> Tensor:
    """The tensor ``context[key]`` with one entry per sample, or an error that names what is there."""
    known = list(context or {})
    if context is None or key not in context:
        raise ConfigError(f"{of} needs context[{key!r}], got {known or 'no context'}.{nearest(key, known)}")
    value = torch.as_tensor(context[key])
    if value.ndim == 0 or value.shape[0] != size:
        raise ConfigError(
            f"{of}: context[{key!r}] has shape {tuple(value.shape)}, expected {size} entries, one a sample."
        )
    return value


def field_of(sample: Sample, name: str | None, *, of: Reward) -> Tensor:
    """The tensor that is judged: the sample itself, or its part ``name``."""
    if isinstance(sample, Tensor) and name is None:
        return sample
    if isinstance(sample, Mapping) and name is not None and name in sample:
        return sample[name]
    parts = list(sample) if isinstance(sample, Mapping) else ["a single tensor"]
    raise ConfigError(f"{of}: field={name!r}, but the sample is {parts}; give field= one of its parts.")
