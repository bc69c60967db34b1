"""Velocity regression given the clock.

Differs from the paper in: everything that its abstract does not say, which is all of this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from genkit.errors import ConfigError
from genkit.pipelines.heavy_tailed_flow.coupling import couple_clocks
from genkit.pipelines.heavy_tailed_flow.denoiser import ClockDenoiser
from genkit.samplers.noise import Keys
from genkit.schedulers.flow import FlowScheduler
from genkit.training.objective import LossOutput, Objective

__all__ = ["HeavyTailedFlowObjective", "LossWeight"]

LossWeight = Literal["velocity", "residual"]


class HeavyTailedFlowObjective(Objective):
    """E_{T, ε, x_0, t} w(A, t) |v_θ(x_t, t, φ(T)) − (√A ε − x_0)|² / d, with x_t = (1 − t) x_0 + t √A ε and A = T_1.

    Any positive weight that depends on (A, t) alone keeps the minimiser, since the network is told both:

    * ``"velocity"``: w = 1/(A + s²), the inverse of the target's second moment;
    * ``"residual"``: w = D/(A s²) = 1/c_out², the inverse of the conditional variance for Gaussian data.

    Args:
        denoiser: fitted to the data (:meth:`ClockDenoiser.fit`).
        scheduler: a flow scheduler with ``flow`` prediction.
        loss_weight: ``"velocity"`` or ``"residual"``, see above.

    Raises:
        ConfigError: a scheduler of another prediction type, or an unknown ``loss_weight``.

    The data's batches hold ``sample`` (B, d) in data units and, for a class-conditional network, ``label`` int64 (B,).
    """

    def __init__(
        self,
        denoiser: ClockDenoiser,
        scheduler: FlowScheduler,
        loss_weight: LossWeight = "velocity",
    ) -> None:
        if scheduler.prediction_type != denoiser.prediction_type:
            raise ConfigError(
                f"the scheduler expects {scheduler.prediction_type!r}, the denoiser predicts "
                f"{denoiser.prediction_type!r}; use FlowScheduler(prediction_type={denoiser.prediction_type!r})"
            )
        if loss_weight not in get_args(LossWeight):
            raise ConfigError(f"loss_weight={loss_weight!r}; expected one of {', '.join(get_args(LossWeight))}")
        self.denoiser, self.scheduler, self.loss_weight = denoiser, scheduler, loss_weight

    def networks(self) -> Mapping[str, nn.Module]:
        return {"denoiser": self.denoiser}

    def loss(self, turn: str, batch: Mapping[str, Tensor], *, step: int, keys: Keys) -> LossOutput:
        x0 = self.denoiser.transform.standardise(batch["sample"])
        labels = batch.get("label")
        t, tie_break = keys.at(purpose="time").uniform((2,)).unbind(-1)
        with torch.no_grad():
            path = self.denoiser.clock.path(keys.at(purpose="clock"), self.denoiser.features.grid).to(x0.device)
            path = path[couple_clocks(self.denoiser.config["coupling"], path[:, -1], x0.norm(dim=1), tie_break, labels)]
            cond = {"clock": path[:, -1], "features": self.denoiser.features(path)}
        if labels is not None:
            cond["class_labels"] = labels
        context = {"scale": cond["clock"].sqrt()}
        t = t.to(torch.float32)
        noise = keys.at(purpose="noise").normal(x0.shape[1:], x0.dtype)
        x_t = self.scheduler.add_noise(x0, noise, t, context)
        error = self.net("denoiser")(x_t, t, cond) - self.scheduler.target(x0, noise, t, context)
        return LossOutput((self._weight(t, cond["clock"]) * error.square().mean(dim=1)).mean())

    def _weight(self, t: Tensor, clock: Tensor) -> Tensor:
        if self.loss_weight == "residual":
            return self.denoiser.coefficients(t, clock)[1].pow(-2).to(torch.float32)
        return 1.0 / (clock + self.denoiser.conditional_scale(clock).square()).to(torch.float32)
