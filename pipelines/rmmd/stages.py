"""One training run from data to a rewarded student: the teacher's phase, then those of another objective.

Differs from the paper in: nothing; the paper trains its teachers elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from genkit.samplers.noise import Keys
from genkit.training.objective import LossOutput, Objective, Phase
from genkit.training.objectives import DenoisingObjective

__all__ = ["TeacherFirst"]


class TeacherFirst(Objective):
    """Trains the teacher, copies its weights into the networks that start from them, and goes on with ``then``.

    The weights are copied at the start of ``then``'s first phase, as they are at the end of the teacher's (no moving
    average: let the learning rate decay).

    Args:
        teacher: its denoising objective; its network is called ``teacher``.
        steps: of the teacher's phase.
        learning_rate_factor: of the teacher's phase.
        then: the objective whose networks start from the teacher.
        copies: the modules that take over the teacher's weights; of its architecture.
    """

    def __init__(
        self,
        teacher: DenoisingObjective,
        steps: int,
        learning_rate_factor: float,
        then: Objective | None,
        copies: Sequence[nn.Module],
    ) -> None:
        self.teacher, self.then, self.copies = teacher, then, tuple(copies)
        self.first = Phase("teacher", steps, learning_rate_factor)
        self._now: Objective = teacher

    def phases(self) -> Sequence[Phase]:
        return (self.first, *(self.then.phases() if self.then else ()))

    def start_phase(self, name: str) -> None:
        if name == self.first.name or self.then is None:
            return
        if self._now is self.teacher:
            for copy in self.copies:
                copy.load_state_dict(self.teacher.denoiser.state_dict())
            self._now = self.then
        self.then.start_phase(name)

    def bind(self, wrapped: Mapping[str, nn.Module]) -> None:
        self._now.bind(wrapped)

    def networks(self) -> Mapping[str, nn.Module]:
        return self._now.networks()

    def frozen(self) -> Mapping[str, nn.Module]:
        """Empty in the teacher's own phase, so that what it becomes is part of later checkpoints."""
        return {} if self._now is self.teacher else self._now.frozen()

    def turn(self, step: int) -> str:
        return self._now.turn(self._inside(step))

    def loss(self, turn: str, batch: Mapping[str, Tensor], *, step: int, keys: Keys) -> LossOutput:
        return self._now.loss(turn, batch, step=self._inside(step), keys=keys)

    def parameters_without_gradient(self, turn: str) -> Collection[str]:
        return self._now.parameters_without_gradient(turn)

    def _inside(self, step: int) -> int:
        return step if self._now is self.teacher else step - self.first.steps
