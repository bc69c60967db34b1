"""diffusers' own schedulers in genkit's straight walks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from genkit._checks import checked_count, got
from genkit.errors import ConfigError
from genkit.schedulers.transition import Noise

__all__ = ["DiffusersScheduler"]

_PREDICTION_TYPES = {"flow_prediction": "flow"}  # the others have the same name


class DiffusersScheduler:
    """Lets a stateful diffusers scheduler serve a straight walk: ``rollout(denoiser, DiffusersScheduler(ddim), …)``.

    diffusers' ``step`` counts its calls, so the walk must visit the times in order and in one piece: use the solver
    ``"euler"`` (deterministic schedulers) or ``"ancestral"`` (schedulers that draw noise); trees, branches, densities
    and gradient windows need genkit's own schedulers.

    Args:
        scheduler: any diffusers scheduler with ``set_timesteps``, ``timesteps`` and ``step``; it is copied.

    Raises:
        ConfigError: not a diffusers scheduler; a branching or repeated use; samples at different times.
    """

    context_names = ()  # they read none

    def __init__(self, scheduler: Any) -> None:
        for name in ("set_timesteps", "step"):
            if not callable(getattr(scheduler, name, None)):
                raise ConfigError(f"{type(scheduler).__name__} has no {name}(); expected a diffusers scheduler")
        self.scheduler = copy.deepcopy(scheduler)
        self.num_train_timesteps = int(scheduler.config.get("num_train_timesteps", 1000))
        declared = scheduler.config.get("prediction_type", "flow_prediction")
        self.prediction_type = _PREDICTION_TYPES.get(declared, declared)

    def times(self, n: int, device: torch.device | str | None = None) -> Tensor:
        """The scheduler's timesteps over ``num_train_timesteps``, then 0; (n + 1,). Starts a fresh walk."""
        self.scheduler.set_timesteps(checked_count("num_inference_steps", n), device=device)
        timesteps = torch.as_tensor(self.scheduler.timesteps, dtype=torch.float64)
        self._position = 0
        return torch.cat((timesteps / self.num_train_timesteps, timesteps.new_zeros(1)))

    def prior(self, keys: Noise, shape: Sequence[int], context: Any = None, device: Any = None) -> Tensor:
        """Noise of the scheduler's ``init_noise_sigma`` (1 where it has none), float32 (B, \\*shape)."""
        return keys.normal(shape) * float(getattr(self.scheduler, "init_noise_sigma", 1.0))

    def model_input(self, x: Tensor, t: Tensor) -> Tensor:
        """diffusers' ``scale_model_input`` at the walk's position; flow-matching schedulers have none."""
        if not hasattr(self.scheduler, "scale_model_input"):
            return x
        return self.scheduler.scale_model_input(x, self.scheduler.timesteps[self._position])

    def to_x0(self, model_output: Tensor, t: Any, sample: Tensor, context: Any = None) -> Tensor:
        """Not known to a diffusers scheduler outside its ``step``."""
        raise ConfigError("a diffusers scheduler has no pure to_x0; use FlowScheduler or VPScheduler for x0 on the way")

    def transition(
        self,
        model_output: Tensor,
        t: Tensor,
        s: Tensor,
        sample: Tensor,
        context: Any = None,
        eta: float | None = None,
    ) -> _StatefulStep:
        """The next ``step`` of the scheduler, to be taken exactly once.

        Raises:
            ConfigError: samples at different times, or ``eta`` above 0 for a scheduler whose ``step`` has none.
        """
        if not isinstance(model_output, Tensor) or model_output.shape[:1] != sample.shape[:1]:
            raise ConfigError(
                f"model_output has {got(model_output)}; expected a tensor with the batch size {len(sample)} first"
            )
        if t.ndim and bool((t != t[:1]).any()):
            raise ConfigError("a diffusers scheduler cannot hold samples at different times; use a genkit scheduler")
        takes_eta = "eta" in self._step_options
        if eta and not takes_eta:
            raise ConfigError(f"eta={eta}, but the step of {type(self.scheduler).__name__} has no eta; drop it")
        return _StatefulStep(self, model_output, sample, {"eta": eta} if eta is not None and takes_eta else {})

    @property
    def _step_options(self) -> Mapping[str, Any]:
        return inspect.signature(self.scheduler.step).parameters

    def advance(self, model_output: Tensor, sample: Tensor, generator: Any, options: Mapping[str, Any]) -> Tensor:
        """Calls the scheduler's ``step`` at the walk's position and moves on."""
        timestep = self.scheduler.timesteps[self._position]
        self._position += 1
        drawing = {"generator": generator} if "generator" in self._step_options else {}
        return self.scheduler.step(model_output, timestep, sample, return_dict=False, **drawing, **options)[0]


class _NoNoise:
    """Stands for a generator where a step must be deterministic."""

    @property
    def device(self) -> torch.device:
        raise ConfigError("this diffusers scheduler draws noise in its steps; use the solver 'ancestral'")


@dataclass(frozen=True)
class _StatefulStep:
    """One pending step of a diffusers scheduler."""

    owner: DiffusersScheduler
    model_output: Tensor
    x_t: Tensor
    options: Mapping[str, Any]

    @property
    def mode(self) -> Tensor:
        return self.owner.advance(self.model_output, self.x_t, _NoNoise(), self.options)

    def sample(self, keys: Any) -> Tensor:
        seeds = keys.at(purpose="diffusers").words(2).tolist()
        generators = [torch.Generator().manual_seed(high << 31 | low >> 1) for high, low in seeds]
        return self.owner.advance(self.model_output, self.x_t, generators, self.options)

    def log_prob(self, x_s: Tensor) -> Tensor:
        raise ConfigError("a diffusers scheduler's step has no density here; use FlowScheduler or VPScheduler")
