"""What a method brings to training: its networks and its losses. The loop is the Trainer's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from genkit._checks import checked_number
from genkit.errors import ConfigError
from genkit.samplers.noise import Keys

__all__ = ["LossOutput", "Objective", "Phase", "check_phases"]


@dataclass(frozen=True)
class Phase:
    """A training stage with its own optimisers: its name, its length in steps (optimiser updates), and what its
    learning rates are multiplied with.
    """

    name: str
    steps: int
    learning_rate_factor: float = 1.0

    def __post_init__(self) -> None:
        checked_number("learning_rate_factor", self.learning_rate_factor, "a number, at least 0", lambda v: v >= 0.0)
        if self.steps < 1:
            raise ConfigError(f"phase {self.name!r} has {self.steps} steps; give at least 1, or leave the phase out")


def check_phases(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """The phases of an objective; two of one name raise `ConfigError`, because they are started and logged by name."""
    names = [phase.name for phase in phases]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"phases() gave the names {names}; {twice} are there twice, give each phase its own name")
    return tuple(phases)


@dataclass
class LossOutput:
    """The result of one loss evaluation.

    Attributes:
        loss: scalar tensor, the mean over the micro-batch; its backward is the update.
        logs: numbers for the log (scalar tensors or floats), means over the micro-batch as well. Every micro-batch of a
            turn gives the same names.
    """

    loss: Tensor
    logs: Mapping[str, Tensor | float] = field(default_factory=dict)


class Objective:
    """A method's losses and trainable networks. Subclasses define :meth:`networks` and :meth:`loss`.

    A *step* is one optimiser update. The step numbers given to :meth:`turn` and :meth:`loss` count from 0 through all
    phases. All micro-batches of a step belong to one turn; only that turn's network is updated, and the parameters of
    the others neither need nor get gradients (gradients still flow *through* them).
    """

    _wrapped: Mapping[str, nn.Module] = {}

    def phases(self) -> Sequence[Phase]:
        """The stages in order; an empty sequence means one stage, ``train``, of the configuration's ``max_steps``."""
        return ()

    def start_phase(self, name: str) -> None:
        """Called before the first step of each phase (freeze copies here); fresh optimisers are made afterwards.

        On resume it is called for every phase up to the saved one before the saved values are loaded, so it must build
        the same modules whatever the values of the weights are.
        """

    def networks(self) -> Mapping[str, nn.Module]:
        """The trainable networks by turn name; parameters with ``requires_grad=False`` (LoRA bases) stay."""
        raise NotImplementedError(f"{type(self).__name__} must define networks()")

    def frozen(self) -> Mapping[str, nn.Module]:
        """Modules that are only evaluated. They are moved to the device; those that ``start_phase`` made are saved."""
        return {}

    def turn(self, step: int) -> str:
        """Which network step ``step`` trains; by default the only one."""
        names = list(self.networks())
        if len(names) != 1:
            raise ConfigError(
                f"{type(self).__name__} has the networks {names} and does not say whose turn it is; define turn(step)"
            )
        return names[0]

    def loss(self, turn: str, batch: Mapping[str, Tensor], *, step: int, keys: Keys) -> LossOutput:
        """The mean loss of one micro-batch.

        Args:
            turn: the network this step trains; call networks through :meth:`net`.
            batch: tensors (B, \\*) and ``sample_id``, int64 (B,), the samples' dataset indices.
            step: the step's number, from 0.
            keys: noise streams of the samples, keyed by (seed, step, sample id).
        """
        raise NotImplementedError(f"{type(self).__name__} must define loss()")

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        """How many units the mean in :meth:`loss` runs over: samples by default, tokens in a language model.

        The update is the mean over all units of all micro-batches and processes, whatever their sizes. A micro-batch
        of weight 0 must still have a finite loss.
        """
        return float(len(batch["sample_id"]))

    def parameters_without_gradient(self, turn: str) -> Collection[str]:
        """Names of trainable parameters that a turn may leave without a gradient; any other one is an error."""
        return ()

    def net(self, name: str) -> nn.Module:
        """The module to call: in its own turn the one that synchronises gradients, else the plain one."""
        if name in self._wrapped:
            return self._wrapped[name]
        networks = self.networks()
        return networks[name] if name in networks else self.frozen()[name]

    def bind(self, wrapped: Mapping[str, nn.Module]) -> None:
        """Used by the Trainer: what :meth:`net` returns in place of the plain modules."""
        self._wrapped = dict(wrapped)
