"""The pipeline a user holds: a few-step student, its teacher, distillation and reward.

Differs from the paper in: nothing that its abstract states; what a student is allowed to be called with (its own grid,
its own kind of step) is this project's rule.
"""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from diffusers.utils import BaseOutput
from numpy.typing import NDArray
from torch import Tensor, nn

from genkit._calls import adapted_callback, check_call, check_labels, check_latents, walk_steps
from genkit._checks import checked_count, checked_number, checked_shape
from genkit.errors import CheckpointError, ConfigError
from genkit.models.guidance import ClassifierFreeGuidance
from genkit.pipeline import GenkitPipeline
from genkit.pipelines.rmmd.forecast import Draw, ForecastCodec, forecast_dataset
from genkit.pipelines.rmmd.networks import as_denoiser, network_of
from genkit.pipelines.rmmd.weights import checked_choice
from genkit.samplers.noise import training_keys
from genkit.samplers.solvers import Solver
from genkit.samplers.walk import rollout
from genkit.schedulers import VPScheduler
from genkit.training.objective import Objective, Phase

__all__ = ["RMMDOutput", "RMMDPipeline", "weights_hash"]

Network = Literal["student", "teacher"]


@dataclass
class RMMDOutput(BaseOutput):
    """What a call returns.

    Args:
        samples: (n, \\*), in the units that the networks were trained in.
    """

    samples: Tensor | NDArray[Any]


class RMMDPipeline(GenkitPipeline):
    """Samples a few-step student (or its teacher), distils the one from the other, and fine-tunes it on a reward.

    Args:
        student: the network of few steps: (x, t, cond) → output, or a network of diffusers.
        scheduler: the chain of both.
        teacher: the network of many steps, or None where it is no longer needed.
        auxiliary: what the student's moments are read from in training, or None.
        sample_shape: of one sample.
        num_inference_steps: K, the student's steps; it has learnt this grid and no other.
        eta: its stochasticity.
        num_classes: classes it is told; 0: none.
        guidance_scale: of the teacher that it was distilled from, and of calls with ``network="teacher"``.
        teacher_steps, teacher_solver: what such a call takes by default.
        reference_hash: of the teacher's weights; a pipeline with another teacher is refused.
        fields: of forecasts: :meth:`ForecastCodec.to_dict` of what lies between states and samples.

    Raises:
        ConfigError: numbers out of range, a stochasticity of 0 (there is no moment to match).
        CheckpointError: the teacher is not the one that the student comes from.
    """

    model_cpu_offload_seq = "student"
    _callback_tensor_inputs = ["latents", "x0"]
    _optional_components = ["teacher", "auxiliary"]

    def __init__(
        self,
        student: Any,
        scheduler: Any,
        teacher: Any = None,
        auxiliary: Any = None,
        sample_shape: Sequence[int] = (1, 8, 8),
        num_inference_steps: int = 8,
        eta: float = 1.0,
        num_classes: int = 0,
        guidance_scale: float = 1.0,
        teacher_steps: int = 64,
        teacher_solver: str = "ancestral",
        reference_hash: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(student=student, scheduler=scheduler, teacher=teacher, auxiliary=auxiliary)
        found = None if teacher is None else weights_hash(teacher)
        if None not in (found, reference_hash) and found != reference_hash:
            raise CheckpointError(
                f"the student was distilled from the teacher {reference_hash}, this one is {found}; its weights have "
                "changed, or it belongs to another student"
            )
        self.register_to_config(
            sample_shape=list(checked_shape("sample_shape", sample_shape, "the shape of one sample")),
            num_inference_steps=checked_count("num_inference_steps", num_inference_steps),
            eta=checked_number("eta", eta, "above 0, to 1", lambda v: 0.0 < v <= 1.0),
            num_classes=checked_count("num_classes", num_classes, "an integer, at least 0", 0),
            guidance_scale=float(guidance_scale),
            teacher_steps=checked_count("teacher_steps", teacher_steps),
            teacher_solver=teacher_solver,
            reference_hash=reference_hash or found,
            fields=None if fields is None else ForecastCodec.from_dict(fields).to_dict(),
        )

    @classmethod
    def from_teacher(
        cls,
        teacher: nn.Module,
        scheduler: Any = None,
        *,
        sample_shape: Sequence[int] | None = None,
        num_inference_steps: int = 8,
        eta: float = 1.0,
        num_classes: int | None = None,
        guidance_scale: float = 1.0,
        teacher_steps: int = 64,
        teacher_solver: str = "ancestral",
        fields: Mapping[str, Any] | None = None,
    ) -> Self:
        """A pipeline whose student and auxiliary are copies of a trained teacher, ready for :meth:`distill`.

        Args:
            teacher: (x, t, cond) → output, or a network of diffusers (UNet2DModel, DiTTransformer2DModel, …).
            scheduler: the chain it was trained on: one of genkit's Gaussian ones. None: the cosine chain, in the
                teacher's prediction type where it names one.
            sample_shape: None: what the network's configuration says.
            num_classes: None: what the network's configuration says.
            num_inference_steps, eta, guidance_scale, teacher_steps, teacher_solver, fields: see the class.
        """
        if scheduler is None:
            scheduler = VPScheduler(prediction_type=getattr(teacher, "prediction_type", "v_prediction"), eta=eta)
        return cls(
            copy.deepcopy(teacher).requires_grad_(True),
            scheduler,
            teacher,
            copy.deepcopy(teacher).requires_grad_(True),
            sample_shape=_shape_of(teacher) if sample_shape is None else sample_shape,
            num_inference_steps=num_inference_steps,
            eta=eta,
            num_classes=_classes_of(teacher) if num_classes is None else num_classes,
            guidance_scale=guidance_scale,
            teacher_steps=teacher_steps,
            teacher_solver=teacher_solver,
            fields=fields,
        )

    # ---- sampling ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def __call__(
        self,
        num_samples: int = 1,
        num_inference_steps: int | None = None,
        *,
        class_labels: Tensor | Sequence[int] | None = None,
        condition: Tensor | None = None,
        network: Network = "student",
        guidance_scale: float | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        latents: Tensor | None = None,
        times: Sequence[float] | Tensor | None = None,
        solver: str | Solver | None = None,
        eta: float | None = None,
        output_type: str = "pt",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., Mapping[str, Any]] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> RMMDOutput | tuple[Any, ...]:
        """Draws samples.

        Args:
            num_samples: how many, n.
            num_inference_steps: steps of the walk; of the student only those it was distilled for (the default).
            class_labels: int (n,), for class-conditional networks.
            condition: (n, \\*), for networks that are told one.
            network: ``"student"`` or ``"teacher"``.
            guidance_scale: of the teacher, with labels; 1 is the condition alone. None: the one distilled from.
            generator: one generator, or a list with one per sample.
            latents: the state at t = 1, (n, \\*), instead of keyed noise.
            times: custom times of the teacher's walk, strictly decreasing from 1 to 0.
            solver: of the teacher's walk (None: ``teacher_solver``); a student's step is its own kernel.
            eta: stochasticity of the ``"ancestral"`` steps.
            output_type: ``"pt"`` or ``"np"``.
            return_dict: False returns the tuple (samples,).
            callback_on_step_end: called as ``callback(pipe, step, timestep, tensors)``; may return changed ``latents``.
            callback_on_step_end_tensor_inputs: which of ``latents``, ``x0`` it is given.

        Raises:
            ConfigError: an impossible argument, or a student asked to walk another grid than its own; the message
                names it.
        """
        checked_choice("network", network, get_args(Network))
        check_call(num_samples, output_type)
        check_labels(class_labels, num_samples, self.config["num_classes"])
        shape = (num_samples, *self.config["sample_shape"])
        if latents is not None:
            check_latents(latents, shape)
        self.check_callback_inputs(callback_on_step_end_tensor_inputs)
        if network == "student":
            self._check_student_call(num_inference_steps, times, solver, guidance_scale, eta)
        own = self.config["num_inference_steps" if network == "student" else "teacher_steps"]
        chosen = ("ancestral" if network == "student" else self.config["teacher_solver"]) if solver is None else solver
        if eta is None and chosen == "ancestral":
            eta = self.config["eta"] if network == "student" else 1.0
        device = self._execution_device
        sample = rollout(
            self._denoiser(network, guidance_scale),
            self.scheduler,
            None if latents is None else latents.to(device),
            num_inference_steps=walk_steps(num_inference_steps, times, own),
            shape=shape if latents is None else None,
            cond=self._told(class_labels, condition, num_samples, device),
            generator=generator,
            times=times,
            solver=chosen,
            eta=eta,
            callback_on_step_end=adapted_callback(self, callback_on_step_end, callback_on_step_end_tensor_inputs),
            progress=not getattr(self, "_progress_bar_config", {}).get("disable", False),
        ).sample
        output = RMMDOutput(sample.cpu().numpy() if output_type == "np" else sample)
        return output if return_dict else output.to_tuple()

    def forecast(
        self,
        dataset: Any,
        members: int = 8,
        *,
        num_steps: int = 1,
        network: Network = "student",
        generator: torch.Generator | None = None,
    ) -> Any:
        """An ensemble forecast from the last state of a dataset.

        Args:
            dataset: an ``xarray.Dataset`` with the variables that the model was trained on, in their units, and the
                dimension ``time``, up to the state that is forecast from; earlier states too where the model is told
                them.
            members: M.
            num_steps: forecasts one after the other, each of the lead that the model was trained for.
            network: ``"student"`` or ``"teacher"``.
            generator: of all members.

        Returns:
            An ``xarray.Dataset`` of the same variables, with the dimension ``member`` first and the times ahead.

        Raises:
            ConfigError: a model of no fields; a missing variable, dimension or earlier state.
        """
        if self.config["fields"] is None:
            raise ConfigError("this pipeline was trained on no fields, so it forecasts nothing; call it for samples")
        codec = ForecastCodec.from_dict(self.config["fields"])
        return forecast_dataset(codec, self.draw_from(network), dataset, members, num_steps, generator)

    def draw_from(
        self, network: Network = "student", num_inference_steps: int | None = None, solver: str | None = None
    ) -> Draw:
        """(conditions (n, \\*), generator) → samples (n, \\*) of a network: what :func:`roll_out` asks for."""

        def draw(condition: Tensor, generator: torch.Generator | None) -> Tensor:
            output: Any = self(
                len(condition),
                num_inference_steps,
                condition=condition,
                network=network,
                solver=solver,
                generator=generator,
            )
            samples: Tensor = output.samples
            return samples

        return draw

    def _check_student_call(self, steps: Any, times: Any, solver: Any, guidance_scale: Any, eta: Any) -> None:
        own = self.config["num_inference_steps"]
        wrong = {"times": times, "solver": solver, "guidance_scale": guidance_scale}
        given = [name for name, value in wrong.items() if value is not None]
        if given or steps not in (None, own):
            what = f"num_inference_steps={steps}" if steps not in (None, own) else f"{given[0]}={wrong[given[0]]!r}"
            raise ConfigError(
                f"{what}: this student was distilled for {own} steps of its own kernel on its own grid, at the "
                "teacher's guidance, and its samples are wrong anywhere else. Drop the argument, distil for that "
                "number of steps, or ask the teacher with network='teacher'"
            )
        if eta is not None and eta != self.config["eta"]:
            warnings.warn(
                f"eta={eta}, but the student was distilled with eta={self.config['eta']}: its moments are matched "
                "there only",
                stacklevel=3,
            )

    def _denoiser(self, network: Network, guidance_scale: float | None) -> Any:
        module = getattr(self, network)
        if module is None:
            raise ConfigError("this pipeline has no teacher any more; load one that was saved with it")
        denoiser = as_denoiser(module.eval(), self.scheduler.prediction_type)
        scale = self.config["guidance_scale"] if guidance_scale is None else guidance_scale
        if network == "student" or scale == 1.0:
            return denoiser
        null = torch.tensor([self.config["num_classes"]], device=self._execution_device)
        if not self.config["num_classes"]:
            raise ConfigError(f"guidance_scale={scale} of a network without classes; there is nothing to guide by")
        return ClassifierFreeGuidance(denoiser, scale, {"class_labels": null})

    def _told(
        self, class_labels: Any, condition: Tensor | None, num_samples: int, device: torch.device
    ) -> dict[str, Tensor] | None:
        told = {} if class_labels is None else {"class_labels": torch.as_tensor(class_labels, device=device)}
        if condition is not None:
            if len(condition) != num_samples:
                raise ConfigError(
                    f"condition has {len(condition)} rows for num_samples={num_samples}; give one a sample"
                )
            told["condition"] = condition.to(device)
        return told or None

    # ---- training ---------------------------------------------------------------------------------------------------

    def distill(
        self,
        data: Any,
        config: Mapping[str, Any],
        *,
        time_law: str = "continuous",
        weight: Any = "mmd",
        teacher_weight: float = 1.0,
        aux_steps_per_student: int = 1,
        normalize: str | None = None,
        reduction: str = "mean",
    ) -> list[Any]:
        """Phase 1: matches the student's moments with the teacher's, on noised data.

        Args:
            data: map-style set with ``sample``, and ``class_labels`` or ``condition`` where the networks are told them.
            config: the Trainer's keys: at least ``output_dir`` and ``max_steps``; ``learning_rate``, ``batch_size``, …
            time_law, weight, teacher_weight, aux_steps_per_student, normalize, reduction: see
                :class:`MomentMatchingObjective`.

        Returns:
            The log of every step. Student and auxiliary are the trained ones (their moving averages, where
            ``ema_decay`` is set), and ``output_dir/pipeline`` holds this pipeline.
        """
        options = {
            "time_law": time_law,
            "weight": weight,
            "teacher_weight": teacher_weight,
            "aux_steps_per_student": aux_steps_per_student,
            "normalize": normalize,
            "reduction": reduction,
        }
        return self._train("distil", data, config, options)

    def finetune(
        self,
        reward: Any,
        data: Any,
        config: Mapping[str, Any],
        *,
        lam: float | str = 0.1,
        lam_reg: float | None = None,
        members: int = 1,
        on_policy: Any = "continuous",
        reference: str = "auxiliary",
        time_law: str = "continuous",
        weight: Any = "mmd",
        teacher_weight: float = 1.0,
        aux_steps_per_student: int = 1,
        reduction: str = "mean",
    ) -> list[Any]:
        """Phase 2: maximises a reward of the student's own samples; the moments of the start hold it in place.

        Args:
            reward: differentiable; checked on the data before anything is trained.
            data, config: as in :meth:`distill`; of the samples themselves only those entries are used that networks or
                reward are told (all of them with ``on_policy=False``).
            lam: λ; ``"auto:0.3"``: the one at which the reward's gradient is 0.3 times the moments' gap to the teacher,
                on one batch of the data before training.
            lam_reg, members, on_policy, reference, …: see :class:`MomentMatchingObjective`.

        Returns:
            As :meth:`distill`.
        """
        options = {
            "reward": reward,
            "lam_reg": lam_reg,
            "members": members,
            "on_policy": on_policy,
            "reference": reference,
            "time_law": time_law,
            "weight": weight,
            "teacher_weight": teacher_weight,
            "aux_steps_per_student": aux_steps_per_student,
            "reduction": reduction,
        }
        check_reward(reward, data, members)
        options["lam"] = self.lam_for_ratio(_ratio_of(lam), data, options) if isinstance(lam, str) else lam
        return self._train("reward", data, config, options)

    def lam_for_ratio(self, ratio: float, data: Any, options: Mapping[str, Any], count: int = 512) -> float:
        """λ at which the reward's gradient is ``ratio`` times the moments' gap to the teacher, at the start.

        Args:
            ratio: above 0.
            data: of :meth:`finetune`; ``count`` of its items are looked at.
            options: of :class:`MomentMatchingObjective`, the reward among them.

        Raises:
            ConfigError: a gap or a gradient of 0.
        """
        # the gap to the first auxiliary is 0 where training starts; that to the teacher is what distillation left
        probe: Any = self.objective(data, [Phase("reward", 2)], **{**options, "lam": 1.0, "reference": "teacher"})
        probe.start_phase("reward")
        index = torch.arange(min(count, len(data)))
        batch = dict(data[index]) | {"sample_id": index}
        found = float(
            probe.loss("student", batch, step=1, keys=training_keys(0, 0, index)).logs["reward_gradient_ratio"]
        )
        if not (math.isfinite(found) and 0.0 < found < 1e9):
            raise ConfigError(
                f"the reward's gradient is {found:g} times the moments' gap, so no λ gives {ratio}; distil first, or "
                "give lam as a number"
            )
        return ratio / found

    def _train(self, phase: str, data: Any, config: Mapping[str, Any], options: Mapping[str, Any]) -> list[Any]:
        from genkit.training import Trainer, TrainerConfig

        settings = TrainerConfig.model_validate({"method": "rmmd", **config})
        objective = self.objective(data, [Phase(phase, settings.max_steps)], **options)

        def keep(folder: Path, networks: Mapping[str, nn.Module]) -> None:
            for name in ("student", "auxiliary"):
                getattr(self, name).load_state_dict(network_state(networks[name]))
            self.save_pretrained(folder)

        return list(Trainer(objective, settings, data, keep).train())

    def objective(self, data: Any, phases: Sequence[Phase], **options: Any) -> Objective:
        """The objective of this pipeline's networks (copies of student and auxiliary are trained, not these)."""
        from genkit.pipelines.rmmd.objective import MomentMatchingObjective

        if self.teacher is None or self.auxiliary is None:
            raise ConfigError("training needs teacher and auxiliary; load a pipeline that was saved with both")
        first = data[torch.zeros(1, dtype=torch.int64)]
        kind = self.scheduler.prediction_type
        student, auxiliary = (as_denoiser(copy.deepcopy(n), kind) for n in (self.student, self.auxiliary))
        return MomentMatchingObjective(
            student,
            auxiliary,
            as_denoiser(self.teacher, kind),
            self.scheduler,
            num_inference_steps=self.config["num_inference_steps"],
            eta=self.config["eta"],
            guidance_scale=self.config["guidance_scale"],
            phases=phases,
            shape=self.config["sample_shape"],
            condition_names=[name for name in ("class_labels", "condition") if name in first],
            **options,
        )


def _ratio_of(lam: str) -> float:
    """0.3 of ``"auto:0.3"``."""
    name, _, number = lam.partition(":")
    try:
        ratio = float(number)
    except ValueError:
        ratio = 0.0
    if name != "auto" or not 0.0 < ratio < math.inf:
        raise ConfigError(f"lam={lam!r}; expected a number, or 'auto:' and a ratio above 0, such as 'auto:0.3'")
    return ratio


def check_reward(reward: Any, data: Any, members: int, count: int = 16) -> None:
    """Refuses a reward without a gradient, or one that does not rise along it, on ``count`` items of the data."""
    from genkit.rewards import check_differentiable

    batch = data[torch.arange(min(count, len(data)))]
    sample = batch["sample"]
    noise = torch.randn(sample.shape, generator=torch.Generator().manual_seed(0))
    sample = sample + 0.3 * noise  # data may be the optimum of a reward
    if members > 1:
        sample = torch.stack([sample + 0.3 * (k + 1) * noise.roll(k + 1, 0) for k in range(members)], dim=1)
    context = {name: value for name, value in batch.items() if name != "sample_id"}
    context.setdefault("observation", batch["sample"])
    check_differentiable(reward, sample, context)


def network_state(denoiser: nn.Module) -> dict[str, Tensor]:
    """The state of the network inside a denoiser."""
    return dict(network_of(denoiser).state_dict())


def weights_hash(network: nn.Module) -> str:
    """A short hash of a network's weights in half precision, so that storing them in it changes nothing."""
    sums = hashlib.sha256()
    for name, value in sorted(network.state_dict().items()):
        half = value.detach().to("cpu", torch.float16).contiguous()
        sums.update(f"{name}{tuple(half.shape)}".encode())
        sums.update(half.view(torch.uint8).numpy().tobytes() if half.ndim else half.reshape(1).numpy().tobytes())
    return sums.hexdigest()[:16]


def _shape_of(network: Any) -> tuple[int, ...]:
    options = getattr(network, "config", {})
    if "sample_shape" in options:
        return tuple(options["sample_shape"])
    size, channels = options.get("sample_size"), options.get("out_channels", options.get("in_channels"))
    if size is None or channels is None:
        raise ConfigError(f"{type(network).__name__} does not say the shape of a sample; pass sample_shape=")
    return (channels, *((size, size) if isinstance(size, int) else tuple(size)))


def _classes_of(network: Any) -> int:
    options = getattr(network, "config", {})
    embedded = options.get("num_class_embeds")
    return int(options.get("num_classes") or (embedded - 1 if embedded else 0))
