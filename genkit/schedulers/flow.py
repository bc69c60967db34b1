"""The straight path of flow matching."""

from __future__ import annotations

import math

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin  # noqa: F401  (diffusers looks it up here by name)
from torch import Tensor

from genkit._checks import checked_number
from genkit.schedulers.gaussian import (
    Context,
    GaussianScheduler,
    _at_least_float32,
    _check_fit,
    _safe_reciprocal,
)
from genkit.schedulers.transition import expand_as

__all__ = ["FlowScheduler"]


class FlowScheduler(GaussianScheduler):
    """x_t = (1 − t) x_0 + t √A ε, with A = 1 unless the context holds ``"scale"`` = √A.

    The ``flow`` prediction is the velocity f = dx/dt = √A ε − x_0, so that::

        x_0 = x_t − t f,        √A ε = x_t + (1 − t) f

    η = 0 is the Euler step of the ODE, x_s = x_t + (s − t) f; η > 0 is a stochastic step with the same marginals and a
    Gaussian density (see :mod:`genkit.schedulers.gaussian`).

    References: Lipman et al., arXiv 2210.02747; Liu et al., "Flow straight and fast", arXiv 2209.03003; the time
    shift is eq. 23 of Esser et al., arXiv 2403.03206. The scale is not in those papers.

    Args:
        prediction_type: ``"flow"``, ``"v_prediction"`` or ``"sample"`` (``"epsilon"`` is refused, since α(1) = 0).
        eta: stochasticity of :meth:`transition` and :meth:`step`, from 0 to 1.
        shift: the times of a walk are t ↦ shift·t / (1 + (shift − 1) t); above 1 it spends more steps near the noise.
        num_train_timesteps: what a time of 1 is called in diffusers' loops.
    """

    @register_to_config
    def __init__(
        self,
        prediction_type: str = "flow",
        eta: float = 0.0,
        shift: float = 1.0,
        num_train_timesteps: int = 1000,
    ) -> None:
        self.shift = checked_number("shift", shift, "a positive number", lambda value: 0 < value < math.inf)
        self._register(prediction_type, eta, num_train_timesteps)

    def _levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return 1.0 - t, t

    def _level_rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return -torch.ones_like(t), torch.ones_like(t)

    def _grid(self, n: int) -> Tensor:
        t = super()._grid(n)
        return self.shift * t / (1.0 + (self.shift - 1.0) * t)

    def _readout(
        self, t: Tensor | float, alpha: Tensor, sigma: Tensor, context: Context | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self.prediction_type != "flow":
            return super()._readout(t, alpha, sigma, context)
        one, time = torch.ones_like(alpha), 1.0 - alpha
        if context is None or "scale" not in context:
            return one, -time, one, alpha
        inverse = _safe_reciprocal(context["scale"].to(sigma.device, sigma.dtype))
        return one, -time, one * inverse, alpha * inverse

    def velocity(
        self, model_output: Tensor, t: Tensor | float, sample: Tensor, context: Context | None = None
    ) -> Tensor:
        """dx/dt; the model output itself where it predicts the ``flow``."""
        if self.prediction_type == "flow":
            _check_fit(context, "model_output", model_output, "sample", sample, t)
            return _at_least_float32(model_output)
        return super().velocity(model_output, t, sample, context)

    def _output_from(
        self, clean: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor, context: Context | None
    ) -> Tensor:
        if self.prediction_type == "flow" and context is not None and "scale" in context:
            noise = expand_as(context["scale"], clean) * noise
        return super()._output_from(clean, noise, alpha, sigma, context)
