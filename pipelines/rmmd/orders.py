"""The order of distillation and reward: before it, after it, both at once, or after it with nothing that holds.

Every order takes as many steps in all and the same λ, and ends in a student of the same number of steps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

from torch import nn

from genkit.errors import ConfigError
from genkit.pipelines.rmmd.arms import ARMS, STRENGTHS, unit_strength
from genkit.pipelines.rmmd.config import Config
from genkit.pipelines.rmmd.networks import as_denoiser, network_of
from genkit.pipelines.rmmd.pipeline import RMMDPipeline
from genkit.rewards import Reward
from genkit.training import Trainer, TrainerConfig
from genkit.training.objective import Phase

__all__ = ["ORDERS", "students_in_order"]

ORDERS = ("reward_then_distil", "distil_then_reward_only", "rmmd", "rmmd_joint")


def students_in_order(
    arm: str, config: Config, base: RMMDPipeline, data: Any, reward: Reward, seed: int
) -> Iterator[nn.Module]:
    """A student (x, t, cond) → output for each of the :data:`STRENGTHS` of the reward.

    ``reward_then_distil`` fine-tunes the teacher first, by the same objective on the teacher's own grid of steps, and
    distils what comes out of it.

    Args:
        arm: one of :data:`ORDERS`.
        config: how teacher and student were trained; ``evaluation.steps`` is the length of the reward's phase.
        base: the distilled student with its teacher; it is not changed.
        data: the training set.
        reward: what is maximised.
        seed: of the training.
    """
    if config.reward is None:
        raise ConfigError("a comparison of orders needs the part reward, for its learning rate; got reward: null")
    distil, count = config.distil, config.evaluation.steps
    unit = unit_strength(ARMS["rmmd"], base, data, reward)
    matched = distil.model_dump(exclude={"objective", "steps", "learning_rate_factor", "chain_dropout"})
    first = Phase("distil", distil.steps, distil.learning_rate_factor)
    after = Phase("reward", count, config.reward.learning_rate_factor)
    both = Phase("distil", distil.steps + count, distil.learning_rate_factor)
    for strength in STRENGTHS:
        options: dict[str, Any] = {"reward": reward, "lam": strength * unit, "reduction": distil.reduction}
        if arm == "rmmd_joint":
            pipe = _undistilled(base, base.teacher, config.num_inference_steps)
            student = _run(config, pipe, both, data, seed, matched | options | {"joint": True})
        elif arm == "reward_then_distil":
            pipe = _undistilled(base, base.teacher, config.teacher.num_inference_steps)
            rewarded = network_of(_run(config, pipe, after, data, seed, options))
            pipe = _undistilled(base, rewarded, config.num_inference_steps)
            student = _run(config, pipe, first, data, seed, matched)
        else:
            alone = {"weight": "none"} if arm == "distil_then_reward_only" else {}
            student = _run(config, base, after, data, seed, options | alone)
        yield as_denoiser(network_of(student), config.scheduler.prediction_type)


def _undistilled(base: RMMDPipeline, teacher: nn.Module, steps: int) -> RMMDPipeline:
    """A pipeline as ``base``, whose student is still the teacher."""
    same = ("sample_shape", "eta", "num_classes", "guidance_scale", "teacher_steps", "teacher_solver", "fields")
    values = {name: base.config[name] for name in same}
    return RMMDPipeline.from_teacher(teacher, base.scheduler, num_inference_steps=steps, **values)


def _run(config: Config, pipe: RMMDPipeline, phase: Phase, data: Any, seed: int, options: dict[str, Any]) -> nn.Module:
    """The student after one phase, trained on copies."""
    objective: Any = pipe.objective(data, [phase], **options)
    same = config.model_dump(include=set(TrainerConfig.model_fields), exclude={"resume_from_checkpoint"})
    with tempfile.TemporaryDirectory() as folder:
        changed = {"output_dir": folder, "max_steps": phase.steps, "save_steps": 10 * phase.steps, "seed": seed}
        settings = TrainerConfig.model_validate(same | changed | {"progress": False})
        for _ in Trainer(objective, settings, data).train():
            pass
    student: nn.Module = objective.student
    return student
