"""The shared kernel of Gaussian chains x_t = α_t x_0 + σ_t ε, with t = 1 noise and t = 0 data.

One stochastic kernel serves variance-preserving diffusion, EDM levels and flow matching. With x̂_0 and ε̂ read off the
model's output at (x_t, t)::

    x_s = α_s x̂_0 + sqrt(σ_s² − γ²) ε̂ + γ z,      γ = η σ_s σ_{t|s} / σ_t,      σ_{t|s}² = σ_t² − (α_t/α_s)² σ_s²

η = 0 is DDIM (for the flow: the Euler step of the ODE), η = 1 the ancestral posterior of DDPM.

References: Song, Meng, Ermon, "Denoising diffusion implicit models", arXiv 2010.02502, eq. 12 and 16; Salimans, Ho,
"Progressive distillation", arXiv 2202.00512, appendix D (v-prediction); Lipman et al., "Flow matching for generative
modeling", arXiv 2210.02747.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin  # noqa: F401  (diffusers looks it up here by name)
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from genkit._checks import (
    check_generator,
    check_same_shape,
    checked_count,
    checked_eta,
    checked_number,
    checked_shape,
    got,
)
from genkit.errors import ConfigError, nearest
from genkit.schedulers.base import ConfiguredScheduler
from genkit.schedulers.transition import GaussianTransition, Noise, distinct, expand_as, linear_combination

__all__ = ["PREDICTION_TYPES", "Context", "GaussianScheduler", "SchedulerStepOutput"]

PREDICTION_TYPES = ("epsilon", "sample", "v_prediction", "flow")
Context = Mapping[str, Tensor]


@dataclass
class SchedulerStepOutput(BaseOutput):
    """What ``step`` returns, as in diffusers.

    Args:
        prev_sample: the state at the next, less noisy time, (B, \\*).
        pred_original_sample: the predicted clean sample x̂_0, (B, \\*).
    """

    prev_sample: Tensor
    pred_original_sample: Tensor


class GaussianScheduler(ConfiguredScheduler):
    """Base class of :class:`FlowScheduler` and :class:`VPScheduler`: all but the noise levels themselves.

    Every method but ``set_timesteps`` and ``step`` (the adapters for diffusers' loops) is a pure function. ``t`` and
    ``s`` are times in [0, 1], shape () or (B,), **one per sample**; ``context`` may hold ``"scale"`` (B,), the
    source's standard deviation √A of each sample: then σ_t is multiplied by it.

    Noise levels are computed in float64 where the device has it; states are computed in at least float32.

    Raises:
        ConfigError: from every method: tensors of another shape than the state, times or a scale of another batch, and
            times outside [0, 1] that are Python numbers. Values inside tensors are not looked at, since on an
            accelerator that would wait for the device.
    """

    init_noise_sigma = 1.0
    context_names = ("scale",)

    def _register(self, prediction_type: str, eta: float, num_train_timesteps: int) -> None:
        """Checks and keeps the options that all Gaussian schedulers share."""
        if prediction_type not in PREDICTION_TYPES:
            raise ConfigError(
                f"prediction_type={prediction_type!r} is unknown; expected one of {', '.join(PREDICTION_TYPES)}."
                + nearest(prediction_type, PREDICTION_TYPES)
            )
        self.prediction_type = prediction_type
        self.eta = checked_eta(eta)
        self.num_train_timesteps = checked_count("num_train_timesteps", num_train_timesteps)
        self._times: Tensor | None = None
        one = torch.ones((), dtype=torch.float64)
        if prediction_type == "epsilon" and float(self._levels(one)[0]) == 0.0:
            raise ConfigError(
                f"prediction_type='epsilon' with {type(self).__name__}: α(1) = 0, so pure noise says nothing about "
                "x_0 and x_0 = (x − σ ε)/α divides by zero; use 'v_prediction', 'flow' or 'sample'"
            )

    # ---- noise levels -------------------------------------------------------------------------------------------

    def _levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """α(t), σ(t) at scale 1, in the dtype of ``t``."""
        raise NotImplementedError

    def _level_rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """dα/dt, dσ/dt at scale 1, in the dtype of ``t``."""
        raise NotImplementedError

    def alpha_sigma(self, t: Tensor | float, context: Context | None = None) -> tuple[Tensor, Tensor]:
        """α_t and σ_t, each of the shape of ``t`` (and of the context's scale, if there is one)."""
        return self._scaled(self._levels, t, context)

    def _rates(self, t: Tensor | float, context: Context | None) -> tuple[Tensor, Tensor]:
        return self._scaled(self._level_rates, t, context)

    @staticmethod
    def _scaled(levels: Any, t: Tensor | float, context: Context | None) -> tuple[Tensor, Tensor]:
        t, scale = _as_time(t), _scale_of(context)
        if scale is None:
            alpha, sigma = levels(distinct(t))
            return alpha.expand(t.shape), sigma.expand(t.shape)
        if t.ndim and scale.ndim and t.shape[0] != scale.shape[0] and 1 not in (t.shape[0], scale.shape[0]):
            raise ConfigError(f"t has {got(t)}, but context['scale'] has {got(scale)}; expected one of each per sample")
        scale = scale.to(t.device, t.dtype)
        t = distinct(t)
        alpha, sigma = levels(t.reshape(t.shape + (1,) * (scale.ndim - t.ndim)) if t.ndim else t)
        return alpha.expand_as(sigma * scale) if alpha.ndim else alpha, sigma * scale

    def times(self, n: int, device: torch.device | str | None = None) -> Tensor:
        """The n + 1 times of a walk with n steps, from 1 to 0, strictly decreasing.

        The values are representable in float32 (what a network is told) and held in float64 where the device has it,
        so that network and kernel see the same time.

        Raises:
            ConfigError: ``n`` is not a positive integer.
        """
        times = self._grid(checked_count("num_inference_steps", n)).to(torch.float32)
        return times.to(device) if _lacks_float64(device) else times.to(torch.float64).to(device)

    def _grid(self, n: int) -> Tensor:
        return torch.linspace(1.0, 0.0, n + 1, dtype=torch.float64)

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor | float, context: Context | None = None) -> Tensor:
        """x_t = α_t x_0 + σ_t ε for unit noise ε, (B, \\*): computed in at least float32, returned as ``x0.dtype``."""
        _check_fit(context, "noise", noise, "x0", x0, t)
        clean = _at_least_float32(x0)
        alpha, sigma = self.alpha_sigma(t, context)
        return (expand_as(alpha, clean) * clean + expand_as(sigma, clean) * noise.to(clean.dtype)).to(x0.dtype)

    def prior(self, keys: Noise, shape: Sequence[int], context: Context | None = None, device: Any = None) -> Tensor:
        """Pure noise σ_1 ε to start a walk from, float32 (B, \\*shape); ``shape`` is one sample's."""
        noise = keys.normal(checked_shape("shape", shape, "the shape of one sample, a sequence of sizes"))
        _check_fit(context, "noise", noise, "noise", noise)
        return expand_as(self.alpha_sigma(torch.ones((), device=noise.device), context)[1], noise) * noise

    # ---- prediction types ---------------------------------------------------------------------------------------

    def _readout(
        self, t: Tensor | float, alpha: Tensor, sigma: Tensor, context: Context | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """a, b, c, d with x̂_0 = a x + b f and ε̂ = c x + d f for the model output f: coefficients, one per sample."""
        if self.prediction_type == "epsilon":
            return 1.0 / alpha, -sigma / alpha, torch.zeros_like(alpha), torch.ones_like(alpha)
        if self.prediction_type == "sample":
            inverse = _safe_reciprocal(sigma)
            return torch.zeros_like(alpha), torch.ones_like(alpha), inverse, -alpha * inverse
        if self.prediction_type == "v_prediction":
            norm = alpha.square() + sigma.square()
            return alpha / norm, -sigma / norm, sigma / norm, alpha / norm
        norm = alpha + sigma
        return 1.0 / norm, -sigma / norm, 1.0 / norm, alpha / norm

    def to_x0(self, model_output: Tensor, t: Tensor | float, sample: Tensor, context: Context | None = None) -> Tensor:
        """The clean sample x̂_0 that ``model_output`` predicts at (``sample``, t), (B, \\*), in at least float32."""
        _check_fit(context, "model_output", model_output, "sample", sample, t)
        if self.prediction_type == "sample":
            return _at_least_float32(model_output)
        a, b, _, _ = self._readout(t, *self.alpha_sigma(t, context), context)
        return linear_combination((a, sample), (b, model_output))

    def from_x0(self, x0: Tensor, t: Tensor | float, sample: Tensor, context: Context | None = None) -> Tensor:
        """The model output that stands for the clean sample ``x0`` at (``sample``, t): the inverse of :meth:`to_x0`."""
        _check_fit(context, "x0", x0, "sample", sample, t)
        x, clean = _at_least_float32(sample), _at_least_float32(x0)
        if self.prediction_type == "sample":
            return clean
        alpha, sigma = (expand_as(c, x) for c in self.alpha_sigma(t, context))
        noise = (x - alpha * clean) * _safe_reciprocal(sigma)
        return self._output_from(clean, noise, alpha, sigma, context)

    def _output_from(
        self, clean: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor, context: Context | None
    ) -> Tensor:
        if self.prediction_type == "epsilon":
            return noise
        if self.prediction_type == "v_prediction":
            return alpha * noise - sigma * clean
        return noise - clean

    def target(self, x0: Tensor, noise: Tensor, t: Tensor | float, context: Context | None = None) -> Tensor:
        """What a denoiser with this prediction type should output for the pair (x_0, ε) at t: the regression target."""
        _check_fit(context, "noise", noise, "x0", x0, t)
        clean, unit = _at_least_float32(x0), _at_least_float32(noise)
        if self.prediction_type == "sample":
            return clean
        alpha, sigma = (expand_as(c, clean) for c in self.alpha_sigma(t, context))
        return self._output_from(clean, unit, alpha, sigma, context)

    def velocity(
        self, model_output: Tensor, t: Tensor | float, sample: Tensor, context: Context | None = None
    ) -> Tensor:
        """dx/dt = α'(t) x̂_0 + σ'(t) ε̂ of the probability-flow ODE, (B, \\*). Multi-stage solvers combine these.

        With the levels ``linear`` and ``scaled_linear`` (and ``edm`` with rho < 1) σ' is infinite at t = 0, and so is
        the velocity: there it is refused for a Python 0, and not finite for samples whose tensor ``t`` is 0. Solvers
        never ask for it: a walk lands on t = 0 with an Euler step.
        """
        _check_fit(context, "model_output", model_output, "sample", sample, t)
        self._refuse_infinite_rate(t)
        a, b, c, d = self._readout(t, *self.alpha_sigma(t, context), context)
        alpha_rate, sigma_rate = self._rates(t, context)
        of_sample, of_output = alpha_rate * a + sigma_rate * c, alpha_rate * b + sigma_rate * d
        return linear_combination((of_sample, sample), (of_output, model_output))

    def _refuse_infinite_rate(self, t: Tensor | float) -> None:
        if not isinstance(t, Tensor) and t == 0 and not math.isfinite(self._rates(0.0, None)[1]):
            raise ConfigError(
                f"the velocity of {type(self).__name__} is not finite at t=0, as dσ/dt is not; expected t > 0 (a step "
                "onto t = 0 is a transition)"
            )

    # ---- the kernel ---------------------------------------------------------------------------------------------

    def transition(
        self,
        model_output: Tensor,
        t: Tensor | float,
        s: Tensor | float,
        sample: Tensor,
        context: Context | None = None,
        eta: float | None = None,
    ) -> GaussianTransition:
        """p(x_s | x_t) for 0 ≤ s ≤ t ≤ 1: the kernel of the module's docstring. Samples with s = t stay where they are.

        Args:
            model_output: the denoiser's output at (``sample``, t), (B, \\*).
            t: current times, () or (B,).
            s: next times, () or (B,).
            sample: x_t, (B, \\*).
            context: what the kernel needs per sample (``"scale"``).
            eta: stochasticity in [0, 1]; None takes the scheduler's own.
        """
        eta = self.eta if eta is None else checked_eta(eta)
        _check_fit(context, "model_output", model_output, "sample", sample, t, s)
        if not isinstance(t, Tensor) and not isinstance(s, Tensor) and s > t:
            raise ConfigError(f"s={s!r} is after t={t!r}; expected 0 ≤ s ≤ t ≤ 1, since a step goes from noise to data")
        alpha_t, sigma_t = self.alpha_sigma(t, context)
        alpha_s, sigma_s = self.alpha_sigma(s, context)
        a, b, c, d = self._readout(t, alpha_t, sigma_t, context)
        gamma, direction = _widths(alpha_t, sigma_t, alpha_s, sigma_s, eta)
        stays = _match(_as_time(t) == _as_time(s), sigma_s)
        of_sample = torch.where(stays, 1.0, alpha_s * a + direction * c)
        of_output = torch.where(stays, 0.0, alpha_s * b + direction * d)
        mean = linear_combination((of_sample, sample), (of_output, model_output))
        return GaussianTransition(mean, torch.where(stays, 0.0, gamma) if eta > 0 else gamma)

    # ---- diffusers' loops ---------------------------------------------------------------------------------------

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Prepares ``timesteps`` for diffusers' loops; genkit's own walks never call this."""
        self.num_inference_steps = num_inference_steps
        self._times = self.times(num_inference_steps)
        self._device = device

    @property
    def timesteps(self) -> Tensor:
        """``times[:-1] · num_train_timesteps`` of the last :meth:`set_timesteps`, float32 (n,)."""
        return (self._prepared_times()[:-1] * self.num_train_timesteps).to(torch.float32).to(self._device)

    @property
    def sigmas(self) -> Tensor:
        """σ at all times of the last :meth:`set_timesteps`, float32 (n + 1,), which some of diffusers' loops read."""
        return self.alpha_sigma(self._prepared_times())[1].to(torch.float32).to(self._device)

    def _prepared_times(self) -> Tensor:
        if self._times is None:
            raise ConfigError("timesteps are asked for before set_timesteps(num_inference_steps) was called")
        return self._times

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Does nothing: steps are found by their timestep, not counted. Some of diffusers' pipelines call it."""

    def scale_model_input(self, sample: Tensor, timestep: Any = None) -> Tensor:
        """The sample itself: these chains need no input scaling."""
        return sample

    def step(
        self,
        model_output: Tensor,
        timestep: Tensor | float | int,
        sample: Tensor,
        generator: torch.Generator | list[torch.Generator] | None = None,
        return_dict: bool = True,
    ) -> SchedulerStepOutput | tuple[Tensor, Tensor]:
        """One step from ``timestep`` to the next one of :meth:`set_timesteps`, with diffusers' signature.

        A thin adapter over :meth:`transition`: nothing is counted, so it may be called in any order.

        Raises:
            ConfigError: before ``set_timesteps``, or for a timestep that is not one of ``timesteps``.
        """
        check_generator(generator)
        t, s = self._neighbours(timestep)
        transition = self.transition(model_output, t, s, sample)
        x = transition.mean
        if self.eta > 0 and s > 0:
            noise = randn_tensor(sample.shape, generator=generator, device=sample.device, dtype=sample.dtype)
            x = x + expand_as(transition.std, x) * noise.to(x.dtype)
        clean = self.to_x0(model_output, t, sample).to(sample.dtype)
        x = x.to(sample.dtype)
        return SchedulerStepOutput(x, clean) if return_dict else (x, clean)

    def _neighbours(self, timestep: Tensor | float | int) -> tuple[float, float]:
        timesteps = self.timesteps.cpu()
        if isinstance(timestep, Tensor) and timestep.numel() != 1:
            raise ConfigError(f"timestep has {got(timestep)}; expected one element of scheduler.timesteps")
        value = checked_number(
            "timestep", timestep.item() if isinstance(timestep, Tensor) else timestep, "an element of timesteps"
        )
        index = int((timesteps - value).abs().argmin())
        spacing = float((timesteps[:-1] - timesteps[1:]).min()) if len(timesteps) > 1 else 1.0
        if abs(float(timesteps[index]) - value) > 0.25 * spacing:
            raise ConfigError(
                f"timestep {value:g} is not one of the {len(timesteps)} timesteps of set_timesteps "
                f"(nearest: {float(timesteps[index]):g}); pass an element of scheduler.timesteps"
            )
        return float(self._prepared_times()[index]), float(self._prepared_times()[index + 1])

    def __len__(self) -> int:
        return self.num_train_timesteps


def _check_fit(
    context: Context | None, name: str, value: Any, reference_name: str, reference: Any, *times: Tensor | float
) -> None:
    """Refuses what would fail or broadcast inside: ``value`` is like the reference, times and scale fit its batch."""
    check_same_shape(name, value, reference_name, reference)
    batch, scale = reference.shape[:1], _scale_of(context)
    for t in times:
        if isinstance(t, Tensor) and t.ndim and t.shape not in (batch, (1,)):
            raise ConfigError(
                f"a time has {got(t)}; expected () or {tuple(batch)}, since {reference_name} has {got(reference)}"
            )
    if scale is not None and not _broadcasts(scale.shape, reference.shape):
        raise ConfigError(
            f"context['scale'] has {got(scale)}; expected {tuple(batch)}, since {reference_name} has {got(reference)}"
        )


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    """Whether a shape, filled up with ones on the right, broadcasts to another."""
    return len(shape) <= len(to) and all(k in (1, n) for k, n in zip(shape, to, strict=False))


def _scale_of(context: Context | None) -> Tensor | None:
    if context is None:
        return None
    if not isinstance(context, Mapping):
        raise ConfigError(f"context has type {type(context).__name__}; expected a mapping such as {{'scale': tensor}}")
    scale = context.get("scale")
    if "scale" in context and not isinstance(scale, Tensor):
        raise ConfigError(f"context['scale'] has {got(scale)}; expected a tensor (B,): torch.tensor(…)")
    return scale


def _widths(alpha_t: Tensor, sigma_t: Tensor, alpha_s: Tensor, sigma_s: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """γ = η σ_s σ_{t|s}/σ_t and sqrt(σ_s² − γ²)."""
    if eta == 0.0:
        return torch.zeros_like(sigma_s), sigma_s
    # σ_{t|s}²/σ_t² = 1 − e^{2(λ_t − λ_s)}, with λ = log α/σ
    kept = (alpha_t * sigma_s) * _safe_reciprocal(alpha_s * sigma_t)
    gamma = eta * sigma_s * (1.0 - kept.square()).clamp(min=0.0).sqrt()
    return gamma, (sigma_s.square() - gamma.square()).clamp(min=0.0).sqrt()


def _lacks_float64(device: torch.device | str | None) -> bool:
    return device is not None and torch.device(device).type in ("mps", "xpu")


def _as_time(t: Tensor | float) -> Tensor:
    if not isinstance(t, Tensor):
        expected = "a number from 0 (data) to 1 (noise), or a tensor of them"
        return torch.tensor(checked_number("t", t, expected, lambda value: 0.0 <= value <= 1.0), dtype=torch.float64)
    if t.ndim > 1:
        raise ConfigError(f"t has {got(t)}; expected () or (B,), one time per sample")
    if not t.is_floating_point():
        raise ConfigError(
            f"t has dtype {t.dtype}; expected times in [0, 1] as floating-point numbers. A diffusers timestep is "
            "num_train_timesteps · t: divide by scheduler.num_train_timesteps"
        )
    return t if _lacks_float64(t.device) else t.to(torch.float64)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def _safe_reciprocal(x: Tensor) -> Tensor:
    """1/x, and 0 where x = 0, with finite gradients everywhere."""
    zero = x == 0
    return torch.where(zero, 0.0, 1.0 / torch.where(zero, 1.0, x))


def _match(mask: Tensor, x: Tensor) -> Tensor:
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)) if mask.ndim else mask
