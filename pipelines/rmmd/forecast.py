"""Ensemble forecasts: from the state of an xarray.Dataset, or of a set with known targets, step by step ahead.

Differs from the paper in: nothing that its abstract states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from genkit._checks import checked_count
from genkit.data.weather import clock_features
from genkit.errors import ConfigError, MissingExtraError, nearest

__all__ = ["Draw", "ForecastCodec", "forecast_dataset", "roll_out"]

Draw = Callable[[Tensor, torch.Generator | None], Tensor]


@dataclass(frozen=True)
class ForecastCodec:
    """What lies between states in their units and what the networks see.

    Args:
        names: C channels, ``t2m`` or ``z@500`` (variable and level).
        mean, std: of a state; C numbers.
        scale: typical change over ``lead``; C numbers.
        lead: from a state to the next, in the data's time unit.
        history: which earlier states the networks are told, in the same unit; the first is 0.
        time_unit: of numpy: ``"h"`` hours, ``"D"`` days; ``""``: plain numbers.
        residual: samples are (x_{t+lead} − x_t)/scale; False: (x_{t+lead} − mean)/std.
        mask: the networks are told which values are known.
        calendar: they are told hour of the day and day of the year.
        dims: names of a state's dimensions after the channels, ``["lat", "lon"]``.
        level_dim: of variables with levels.
    """

    names: Sequence[str]
    mean: Sequence[float]
    std: Sequence[float]
    scale: Sequence[float]
    lead: int = 1
    history: Sequence[int] = (0,)
    time_unit: str = ""
    residual: bool = True
    mask: bool = False
    calendar: bool = False
    dims: Sequence[str] = ()
    level_dim: str = "level"

    @classmethod
    def of(cls, data: Any) -> Self:
        """Of one of genkit's sets of forecasts."""
        numbers = {key: getattr(data, key).tolist() for key in ("mean", "std", "scale")}
        shared: dict[str, Any] = {"names": list(data.names), **numbers}
        if hasattr(data, "history_hours"):
            history = list(data.history_hours)
            return cls(**shared, lead=data.lead_hours, history=history, time_unit="h", calendar=True)
        if hasattr(data, "lat_dim"):
            return cls(
                **shared, lead=data.lead, residual=data.kind == "residual", mask=data.nan == "mask",
                dims=[data.lat_dim, data.lon_dim], level_dim=data.level_dim,
            )  # fmt: skip
        return cls(**shared)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    def condition(self, states: Sequence[Tensor], time: Tensor | None) -> Tensor:
        """The condition (…, C', \\*) of a forecast.

        Args:
            states: (…, C, \\*) in units, one for each entry of ``history``; NaN where unknown.
            time: int64 (…,) in the time unit since 1970, for ``calendar``.
        """
        mean, std = (self._channels(v, states[0]) for v in (self.mean, self.std))
        dim = -1 - len(self.dims)
        scaled = [(state - mean) / std for state in states]
        parts = [torch.nan_to_num(s, nan=0.0) for s in scaled]
        if self.mask:
            parts += [(~torch.isnan(s)).to(s) for s in scaled]
        if self.calendar:
            if time is None:
                raise ConfigError("this model is told the hour and the day; give the time of the state")
            parts.append(clock_features(time).to(scaled[0]).expand(*scaled[0].shape[:dim], 4))
        return torch.cat(parts, dim=dim)

    def restore(self, sample: Tensor, state: Tensor) -> Tensor:
        """x_{t+lead} (…, C, \\*) in units."""
        if self.residual:
            return state + self._channels(self.scale, sample) * sample
        return self._channels(self.mean, sample) + self._channels(self.std, sample) * sample

    def _channels(self, values: Sequence[float], like: Tensor) -> Tensor:
        return torch.tensor(values, dtype=like.dtype, device=like.device).reshape(-1, *(1,) * len(self.dims))


def roll_out(
    codec: ForecastCodec,
    draw: Draw,
    states: Sequence[Tensor],
    time: Tensor | None,
    members: int,
    num_steps: int,
    generator: torch.Generator | None,
) -> Tensor:
    """``num_steps`` forecasts one after the other, (num_steps, members, n, C, \\*) in units.

    Args:
        codec: of the data.
        draw: conditions (N, C', \\*) and a generator → samples (N, C, \\*).
        states: the states of ``codec.history``, (n, C, \\*) each.
        time: int64 (n,), of the first state.
        members: M, independent walks.
        num_steps: each is one ``lead``; longer histories must consist of multiples of it.
        generator: of all members and steps.
    """
    late = [h for h in codec.history if h % codec.lead]
    if late and num_steps > 1:
        raise ConfigError(f"history {list(codec.history)} and lead {codec.lead}: {late[0]} hours before a forecast "
                          "lies between two steps; forecast one step")  # fmt: skip
    known = {-h: s.unsqueeze(0).expand(members, *s.shape) for h, s in zip(codec.history, states, strict=True)}
    found = []
    for step in range(num_steps):
        now = step * codec.lead
        then = None if time is None else (time + now).expand(members, len(time))
        condition = codec.condition([known[now - h] for h in codec.history], then)
        sample = draw(condition.flatten(0, 1), generator).unflatten(0, condition.shape[:2])
        known[now + codec.lead] = codec.restore(sample.to(known[now].dtype), known[now])
        found.append(known[now + codec.lead])
    return torch.stack(found)


def forecast_dataset(
    codec: ForecastCodec, draw: Draw, dataset: Any, members: int, num_steps: int, generator: torch.Generator | None
) -> Any:
    """The forecast from the last time of a ``xarray.Dataset``, as one with the dimension ``member``.

    Raises:
        ConfigError: a missing variable, dimension or earlier time.
        MissingExtraError: xarray is not installed.
    """
    try:
        import xarray
    except ImportError as error:
        raise MissingExtraError("forecasts of a Dataset need xarray: install genkit-diffusion[weather]") from error
    members, num_steps = checked_count("members", members), checked_count("num_steps", num_steps)
    times = _times(codec, dataset)
    states = [_state(codec, dataset, times[-1], hours) for hours in codec.history]
    time = None if not codec.calendar else torch.tensor([_since_1970(times[-1], codec.time_unit)])
    found = roll_out(codec, draw, states, time, members, num_steps, generator)[:, :, 0]
    step = _duration(codec, codec.lead)
    if not codec.time_unit:
        step = codec.lead * (times[-1] - times[-2]) if len(times) > 1 else codec.lead
    ahead = np.array([times[-1] + (i + 1) * step for i in range(num_steps)])
    return _to_dataset(xarray, codec, dataset, found.movedim(0, 1).cpu().numpy(), ahead)


def _times(codec: ForecastCodec, dataset: Any) -> np.ndarray:
    if "time" not in dataset.dims or "time" not in dataset.coords:
        raise ConfigError(
            f"the dataset has the dimensions {sorted(map(str, dataset.dims))}; expected 'time' with values"
        )
    times: np.ndarray = dataset["time"].values
    return times


def _duration(codec: ForecastCodec, count: int) -> Any:
    unit: Any = codec.time_unit
    return np.timedelta64(count, unit) if unit else count


def _since_1970(time: Any, unit: Any) -> int:
    return int(np.datetime64(time, unit).astype(np.int64))


def _state(codec: ForecastCodec, dataset: Any, last: Any, before: int) -> Tensor:
    """The state ``before`` the last time, float32 (1, C, \\*)."""
    wanted = last - _duration(codec, before) if before else last
    if wanted not in dataset["time"].values:
        raise ConfigError(f"the forecast needs the state at {wanted}, {before} before the last time; it is not there")
    now = dataset.sel(time=wanted)
    return (
        torch.from_numpy(np.stack([_channel(codec, now, name) for name in codec.names])).to(torch.float32).unsqueeze(0)
    )


def _channel(codec: ForecastCodec, now: Any, name: str) -> np.ndarray:
    variable, _, level = name.partition("@")
    if variable not in now.data_vars:
        known = [str(v) for v in now.data_vars]
        raise ConfigError(f"no variable {variable!r}; the dataset has {known}.{nearest(variable, known)}")
    array = now[variable]
    if level:
        array = array.sel({codec.level_dim: float(level)})
    if set(array.dims) != set(codec.dims):
        raise ConfigError(f"{name} has the dimensions {list(array.dims)}; expected time and {list(codec.dims)}")
    return np.asarray(array.transpose(*codec.dims).values, np.float64)


def _to_dataset(xarray: Any, codec: ForecastCodec, like: Any, values: np.ndarray, times: np.ndarray) -> Any:
    """(M, T, C, \\*) as variables; the levels of one variable side by side."""
    found: dict[str, Any] = {}
    names = [name.partition("@") for name in codec.names]
    for variable in dict.fromkeys(name for name, _, _ in names):
        places = [i for i, (name, _, _) in enumerate(names) if name == variable]
        levels = [codec.level_dim] if names[places[0]][2] else []
        part = values[:, :, places] if levels else values[:, :, places[0]]
        found[variable] = (("member", "time", *levels, *codec.dims), part, like[variable].attrs)
    kept = {key: c for key, c in like.coords.items() if "time" not in c.dims and key != "time"}
    coords = {"member": np.arange(len(values)), "time": times, **kept}
    return xarray.Dataset(found, coords=coords, attrs=like.attrs)
