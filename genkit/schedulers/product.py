"""Chains whose state has parts: one scheduler a field, the other fields passed through unchanged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin  # noqa: F401  (diffusers looks it up here by name)
from torch import Tensor

from genkit._checks import checked_number
from genkit.errors import ConfigError, nearest
from genkit.schedulers.base import ConfiguredScheduler
from genkit.schedulers.gaussian import Context
from genkit.schedulers.transition import Noise, Transition

__all__ = ["ProductScheduler", "ProductTransition"]

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class ProductTransition:
    """The product of independent transitions, one a field.

    Args:
        parts: field → transition.
        passed: fields of the state that the step leaves as they are (a mask, for example).
    """

    parts: Mapping[str, Transition]
    passed: State

    @property
    def mode(self) -> dict[str, Tensor]:
        """The mode of every field, with the passed fields."""
        return {**self.passed, **{name: part.mode for name, part in self.parts.items()}}

    def sample(self, keys: Noise) -> dict[str, Tensor]:
        """One state; each field reads its own random stream."""
        drawn = {name: part.sample(_field_keys(keys, name)) for name, part in self.parts.items()}
        return {**self.passed, **drawn}

    def log_prob(self, x_s: State) -> Tensor:
        """Σ over the fields of their log-densities, (B,); padding adds 0."""
        return torch.stack([part.log_prob(x_s[name]) for name, part in self.parts.items()]).sum(dim=0)

    def unchecked_log_prob(self, x_s: State) -> Tensor:
        """:meth:`log_prob`, with NaN instead of an error where a field's width is 0."""
        scores = [getattr(p, "unchecked_log_prob", p.log_prob)(x_s[name]) for name, p in self.parts.items()]
        return torch.stack(scores).sum(dim=0)


class ProductScheduler(ConfiguredScheduler):
    """Acts on each field of a state (a plain dict of tensors) with that field's scheduler.

    All fields share the context and the walk's time t, of which each reads its own power: a field with a power above 1
    is cleaner than the others all along, and is decided before them. Methods have the signatures of the single
    schedulers, with dicts in the place of tensors; the model output is a dict with one entry a field.

    Args:
        schedulers: field → scheduler; from a configuration, a list of ``{"field", "class", options}`` (a list, because
            JSON files do not keep the order of keys, and the first field gives the times).
        masks: field → name of the state's boolean field (B, N) that marks the field's real elements; the others are
            padding: they add nothing to ``log_prob``.
        powers: field → p, above 0: the field's own time is t^p. Missing ones are 1.

    Raises:
        ConfigError: no field, a scheduler that has no ``transition``, an unknown class name in a configuration, or a
            mask or power of an unknown field.
    """

    @register_to_config
    def __init__(
        self,
        schedulers: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        masks: Mapping[str, str] | None = None,
        powers: Mapping[str, float] | None = None,
    ) -> None:
        if not schedulers:
            raise ConfigError("ProductScheduler needs at least one field: ProductScheduler({'coords': scheduler, …})")
        if not isinstance(schedulers, Mapping):
            schedulers = dict(_described_field(value) for value in _entries(schedulers))
        self.schedulers = {name: _built(name, value) for name, value in schedulers.items()}
        if masks is not None and not isinstance(masks, Mapping):
            raise ConfigError(f"masks has type {type(masks).__name__}; expected a mapping from field to mask field")
        self.masks = dict(masks or {})
        for kind, named in (("masks", self.masks), ("powers", powers or {})):
            for name in named:
                if name not in self.schedulers:
                    known = nearest(name, self.schedulers)
                    raise ConfigError(f"{kind} names the field {name!r}, which has no scheduler.{known}")
        self.powers = {
            name: checked_number(f"powers[{name!r}]", p, "a number above 0", lambda v: 0.0 < v < math.inf)
            for name, p in (powers or {}).items()
        }
        described = [{"field": name, **_described(scheduler)} for name, scheduler in self.schedulers.items()]
        self.register_to_config(schedulers=described, masks=self.masks, powers=self.powers)
        self.prediction_type = {name: getattr(s, "prediction_type", None) for name, s in self.schedulers.items()}

    @property
    def context_names(self) -> Sequence[str] | None:  # type: ignore[override]
        """What any of the fields reads; None where one does not say."""
        names: set[str] = set()
        for scheduler in self.schedulers.values():
            known = getattr(scheduler, "context_names", None)
            if known is None:
                return None
            names.update(known)
        return sorted(names)

    def times(self, n: int, device: torch.device | str | None = None) -> Tensor:
        """The times of the first field's scheduler, (n + 1,)."""
        return next(iter(self.schedulers.values())).times(n, device)

    def field_time(self, name: str, t: Tensor | float) -> Tensor | float:
        """A field's own time, t^p, of the shape of ``t``."""
        power = self.powers.get(name, 1.0)
        return t if power == 1.0 else t**power

    def _each(self, method: str, state: State, *dicts: State, t: Any, context: Context | None) -> dict[str, Tensor]:
        changed = {}
        for name, scheduler in self.schedulers.items():
            arguments = [_field(d, name) for d in dicts]
            changed[name] = getattr(scheduler, method)(*arguments, self.field_time(name, t), context=context)
        return {**state, **changed}

    def add_noise(
        self, x0: State, noise: State, t: Tensor | float, context: Context | None = None
    ) -> dict[str, Tensor]:
        """Each field's ``add_noise``; fields without a scheduler are passed through."""
        return self._each("add_noise", x0, x0, noise, t=t, context=context)

    def to_x0(
        self, model_output: State, t: Tensor | float, sample: State, context: Context | None = None
    ) -> dict[str, Tensor]:
        """Each field's clean prediction; fields without a scheduler are passed through."""
        clean = {
            name: scheduler.to_x0(_field(model_output, name), self.field_time(name, t), _field(sample, name), context)
            for name, scheduler in self.schedulers.items()
        }
        return {**sample, **clean}

    def prior(
        self, keys: Any, shapes: Mapping[str, Sequence[int]], context: Context | None = None
    ) -> dict[str, Tensor]:
        """Pure noise for every field; ``shapes`` holds the per-sample shape of each."""
        return {
            name: scheduler.prior(_field_keys(keys, name), _field(shapes, name), context)
            for name, scheduler in self.schedulers.items()
        }

    def transition(
        self,
        model_output: State,
        t: Tensor | float,
        s: Tensor | float,
        sample: State,
        context: Context | None = None,
        eta: float | None = None,
    ) -> ProductTransition:
        """The product of the fields' transitions, with their masks."""
        parts: dict[str, Transition] = {}
        for name, scheduler in self.schedulers.items():
            times = self.field_time(name, t), self.field_time(name, s)
            part = scheduler.transition(_field(model_output, name), *times, _field(sample, name), context, eta)
            parts[name] = replace(part, mask=_field(sample, self.masks[name])) if name in self.masks else part
        passed = {name: value for name, value in sample.items() if name not in self.schedulers}
        return ProductTransition(parts, passed)


def _field_keys(keys: Any, name: str) -> Any:
    """A stream of its own for each field: the purpose is extended by the field's name."""
    return keys.at(purpose=f"{keys.purpose}/{name}")


def _field(state: Mapping[str, Any], name: str) -> Any:
    if not isinstance(state, Mapping):
        raise ConfigError(f"ProductScheduler got a {type(state).__name__}; expected a dict with the field {name!r}")
    if name not in state:
        raise ConfigError(f"the state has no field {name!r}; it has {', '.join(state)}.{nearest(name, state)}")
    return state[name]


def _entries(schedulers: Any) -> Sequence[Any]:
    if isinstance(schedulers, str) or not isinstance(schedulers, Sequence):
        raise ConfigError(
            f"schedulers has type {type(schedulers).__name__}; expected a mapping from field to scheduler"
        )
    return schedulers


def _described_field(entry: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("field"), str):
        raise ConfigError(
            f"schedulers holds a {type(entry).__name__}; expected entries {{'field': …, 'class': …, options}}, or a "
            "mapping from field to scheduler"
        )
    return entry["field"], {key: value for key, value in entry.items() if key != "field"}


def _described(scheduler: Any) -> dict[str, Any]:
    options = {key: value for key, value in dict(scheduler.config).items() if not key.startswith("_")}
    return {"class": type(scheduler).__name__, **options}


def _built(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        if isinstance(value, type) or not callable(getattr(value, "transition", None)):
            raise ConfigError(f"field {name!r}: {type(value).__name__} has no pure transition; use a genkit scheduler")
        return value
    import genkit.schedulers

    options = dict(value)
    class_name = options.pop("class", None)
    if class_name not in genkit.schedulers.__all__ or not str(class_name).endswith("Scheduler"):
        known = [n for n in genkit.schedulers.__all__ if n.endswith("Scheduler")]
        raise ConfigError(f"field {name!r}: {class_name!r} is no genkit scheduler.{nearest(str(class_name), known)}")
    return getattr(genkit.schedulers, class_name).from_config(options)
