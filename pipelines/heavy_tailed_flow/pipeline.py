"""The pipeline a user holds: samples with their clocks, and the tail knob.

Differs from the paper in: the conditional scale, the rank coupling and the spliced tail are this project's; see this
folder's README.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils import BaseOutput
from numpy.typing import NDArray
from torch import Tensor

from genkit._calls import adapted_callback, check_call, check_labels, check_latents, walk_steps
from genkit.errors import ConfigError
from genkit.pipeline import GenkitPipeline
from genkit.pipelines.heavy_tailed_flow.clocks import Clock
from genkit.pipelines.heavy_tailed_flow.denoiser import ClockDenoiser
from genkit.samplers.noise import Keys, draw_keys
from genkit.samplers.solvers import Solver
from genkit.samplers.walk import rollout
from genkit.schedulers.flow import FlowScheduler

__all__ = ["HeavyTailedFlowOutput", "HeavyTailedFlowPipeline"]

_CHUNK = 65536


@dataclass
class HeavyTailedFlowOutput(BaseOutput):
    """What a call returns.

    Args:
        samples: (n, d) in data units.
        clocks: the clock A of each sample, float64 (n,).
        clipped_share: share of clock features that had to be clipped because the clock was far outside the training
            law.
    """

    samples: Tensor | NDArray[Any]
    clocks: Tensor | NDArray[Any]
    clipped_share: float


class HeavyTailedFlowPipeline(GenkitPipeline):
    """Samples heavy-tailed vectors by a flow from a Gaussian scale mixture, given a random clock.

    Each sample draws a clock path T with terminal value A, starts at √A ε with ε ~ N(0, I), and follows the velocity
    that the network predicts given the clock, from t = 1 to t = 0.

    Args:
        denoiser: the trained network with its clock law, data transform and conditional scale.
        scheduler: the flow's chain.
    """

    model_cpu_offload_seq = "denoiser"
    _callback_tensor_inputs = ["latents", "x0"]

    def __init__(self, denoiser: ClockDenoiser, scheduler: FlowScheduler) -> None:
        super().__init__()
        self.register_modules(denoiser=denoiser, scheduler=scheduler)

    @torch.no_grad()
    def __call__(
        self,
        num_samples: int = 1,
        num_inference_steps: int | None = None,
        *,
        clock: Clock | Mapping[str, Any] | None = None,
        tail_index: float | None = None,
        splice_at: float | None = None,
        class_labels: Tensor | Sequence[int] | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        latents: Tensor | None = None,
        times: Sequence[float] | Tensor | None = None,
        solver: str | Solver = "heun",
        eta: float | None = None,
        output_type: str = "pt",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., Mapping[str, Any]] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> HeavyTailedFlowOutput | tuple[Any, ...]:
        """Draws samples.

        Args:
            num_samples: how many, n.
            num_inference_steps: steps of the walk (20, unless ``times`` are given).
            clock: another clock law than the one trained on (the bulk moves with it; prefer ``tail_index``).
            tail_index: the wanted tail index: above its ``splice_at``-quantile the clock gets a Pareto tail of this
                index, the bulk stays. Needs a network trained with rank coupling.
            splice_at: the clock quantile from which ``tail_index`` acts (None: 0.95).
            class_labels: int (n,), for a class-conditional network.
            generator: one generator, or a list with one per sample.
            latents: unit noise ε (n, d) to start from, instead of the keyed one.
            times: custom times of the walk instead of ``num_inference_steps``, strictly decreasing from 1 to 0.
            solver: see :func:`genkit.samplers.rollout`.
            eta: stochasticity of the solver ``"ancestral"``.
            output_type: ``"pt"`` or ``"np"``.
            return_dict: False returns the tuple (samples, clocks, clipped_share).
            callback_on_step_end: called as ``callback(pipe, step, timestep, tensors)``; may return changed ``latents``.
                More than 65,536 samples walk in chunks of that many: steps and progress bar then start anew with each
                chunk, and the tensors are the chunk's.
            callback_on_step_end_tensor_inputs: which of ``latents``, ``x0`` it is given.

        Raises:
            ConfigError: an impossible argument; the message names it.
        """
        if splice_at is not None and tail_index is None:
            raise ConfigError(f"splice_at={splice_at} acts only with tail_index; give tail_index, or drop splice_at")
        law = self._clock_law(clock, tail_index, 0.95 if splice_at is None else splice_at)
        self._check_inputs(num_samples, class_labels, latents, output_type, callback_on_step_end_tensor_inputs)
        num_inference_steps = walk_steps(num_inference_steps, times, 20)
        device = self._execution_device
        keys = draw_keys(generator, num_samples, device)
        callback = adapted_callback(self, callback_on_step_end, callback_on_step_end_tensor_inputs)
        precision = torch.promote_types(self.denoiser.dtype, torch.float32)
        chunks, clipped = [], 0.0
        for start in range(0, max(num_samples, 1), _CHUNK):
            part = slice(start, start + _CHUNK)
            path = law.path(keys[part].at(purpose="clock"), self.denoiser.features.grid).to(device)
            cond = {"clock": path[:, -1], "features": self.denoiser.features(path)}
            clipped += len(path) * self.denoiser.features.clipped_share(cond["features"])
            if class_labels is not None:
                cond["class_labels"] = torch.as_tensor(class_labels, device=device)[part]
            x = self._walk(
                keys[part],
                cond,
                None if latents is None else latents[part].to(device, precision),
                num_inference_steps,
                times,
                solver,
                eta,
                callback,
            )
            chunks.append((self.denoiser.transform.restore(x), cond["clock"]))
        samples, clocks = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        self._warn_outside_training_law(clocks, law)
        _warn_nonfinite(samples, clocks)
        share = clipped / max(num_samples, 1)
        if output_type == "np":
            output = HeavyTailedFlowOutput(samples.cpu().numpy(), clocks.cpu().numpy(), share)
        else:
            output = HeavyTailedFlowOutput(samples, clocks, share)
        return output if return_dict else output.to_tuple()

    def _walk(
        self,
        keys: Keys,
        cond: Mapping[str, Tensor],
        noise: Tensor | None,
        num_inference_steps: int | None,
        times: Sequence[float] | Tensor | None,
        solver: str | Solver,
        eta: float | None,
        callback: Callable[..., Any] | None,
    ) -> Tensor:
        """The same walk that training regresses on, in standardised units."""
        context = {"scale": cond["clock"].sqrt()}
        shape = (len(keys), self.denoiser.config["channels"])
        start = None if noise is None else context["scale"].unsqueeze(1).to(torch.float32) * noise
        return rollout(
            self.denoiser,
            self.scheduler,
            start,
            num_inference_steps=num_inference_steps,
            shape=shape if start is None else None,
            cond=cond,
            context=context,
            generator=keys,
            times=times,
            solver=solver,
            eta=eta,
            callback_on_step_end=callback,
            progress=not self._progress_bar_disabled(),
        ).sample

    def _progress_bar_disabled(self) -> bool:
        return bool(getattr(self, "_progress_bar_config", {}).get("disable", False))

    def _clock_law(self, clock: Clock | Mapping[str, Any] | None, tail_index: float | None, splice_at: float) -> Clock:
        """The law to sample clocks from."""
        law = self.denoiser.clock if clock is None else clock if isinstance(clock, Clock) else Clock.from_dict(clock)
        if tail_index is None:
            return law
        if self.denoiser.config["coupling"] != "rank":
            warnings.warn(
                "tail_index was given, but this network was trained with independent coupling: every clock leads to "
                "the same data law, so the tail will not follow. Train with coupling: rank for a tail knob.",
                stacklevel=3,
            )
        return law.splice(splice_at, tail_index=tail_index)

    def _check_inputs(
        self,
        num_samples: int,
        class_labels: Tensor | Sequence[int] | None,
        latents: Tensor | None,
        output_type: str,
        callback_inputs: Sequence[str],
    ) -> None:
        check_call(num_samples, output_type)
        if latents is not None:
            check_latents(latents, (num_samples, self.denoiser.config["channels"]))
        self.check_callback_inputs(callback_inputs)
        check_labels(class_labels, num_samples, self.denoiser.config["num_classes"])

    def _warn_outside_training_law(self, clocks: Tensor, law: Clock) -> None:
        trained = self.denoiser.clock
        if law == trained or not len(clocks):
            return
        low, high = (float(v) for v in trained.quantile(torch.tensor([1e-4, 1.0 - 1e-4], dtype=torch.float64)))
        share = float(((clocks < low) | (clocks > high)).double().mean())
        if share > 0.01:
            warnings.warn(
                f"{100 * share:.1f} % of the sampled clocks lie outside the central 99.98 % of the training law "
                f"({low:.3g} to {high:.3g}): the network extrapolates there. Retrain on the heavier law, or "
                "splice the tail with tail_index, which leaves the bulk alone.",
                stacklevel=3,
            )


def _warn_nonfinite(samples: Tensor, clocks: Tensor) -> None:
    bad = int((~torch.isfinite(samples).all(dim=1)).sum())
    if bad:
        warnings.warn(
            f"{bad} of {len(samples)} samples are not finite: clocks up to {float(clocks.max()):.1e} leave the range "
            f"of {samples.dtype}. Ask for a larger tail index.",
            stacklevel=3,
        )
