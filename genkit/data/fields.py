"""Forecasts of gridded fields from a user's own netCDF file or zarr store, read lazily through xarray.

A variable has the dimensions time, latitude and longitude, and perhaps a level, in any order. Levels become channels.
xarray and netCDF4 come with the extra ``weather``; a zarr store needs zarr beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genkit._checks import checked_count, checked_number, got
from genkit.data.splits import checked_split
from genkit.data.text import checked_index
from genkit.errors import ConfigError, MissingExtraError, nearest

__all__ = ["FieldForecast"]

_CHUNK = 32  # times that are read at once for the statistics
_POLICIES, _KINDS = ("mask", "refuse"), ("residual", "state")
_DESCRIPTIONS = (".zarray", ".zgroup", ".zmetadata", "zarr.json")
_UNSAFE_CODECS = ("pickle", "numcodecs.pickle")  # run code of the file


class FieldForecast:
    r"""Fields ``lead`` steps ahead as a map-style data set: ``data[index (b,)] -> {…}``, float32 (b, C, H, W).

    ``x_t`` are the C channels at time t: the variables in order, the levels of each in the order of the file. An item
    has

    * ``sample``: r = (x_{t+lead} - x_t) / scale, or (x_{t+lead} - mean) / std with ``kind="state"``;
    * ``observation``: ``sample`` with NaN where the file has none;
    * ``condition``: (x_t - mean) / std; with ``nan="mask"`` then C channels more, 1 where x_t is known and 0 elsewhere;
    * ``state`` and ``target``: x_t and x_{t+lead} in the units of the file, NaN included.

    Sample and condition are 0 where a value is missing. Statistics see the training period only, channel by channel.
    Only the rows of an index are read. Weights for areas are cos(``latitudes``).

    Args:
        source: a netCDF file, a folder with a zarr store, or an open ``xarray.Dataset``.
        variables: names, in order; None takes all that have time, latitude and longitude.
        lead: steps ahead, at least 1.
        split: ``"train"``, ``"test"`` (the last ``holdout`` share of the times) or ``"all"``; both ends of an item lie
            in its split.
        holdout: a share in (0, 1).
        gap: steps that are left out between training and test, at least 0.
        kind: ``"residual"`` or ``"state"``, what the sample is.
        nan: ``"mask"`` or ``"refuse"``: an error that names variable, time and place of the first missing value read.
        time_dim, lat_dim, lon_dim, level_dim: what the file calls its dimensions.

    Attributes:
        names: C channels such as ``t2m`` or ``z@500``.  variables: as chosen.
        latitudes: float64 (H,) in degrees, as in the file.  times: the values of the time coordinate at t, (n,).
        mean, std, scale: float64 (C,), of x and (root mean square) of x_{t+lead} - x_t, known values only.
        dataset: the open ``xarray.Dataset``.  rows: int64 (n,), the places of t in it.

    Raises:
        ConfigError: no such file, or neither netCDF nor zarr; a missing variable or dimension (the nearest name is
            given), times that are unsorted or irregular, fewer than two, a split too short, a channel that is constant
            or has no value, missing values with ``nan="refuse"``; an index out of range.
        MissingExtraError: xarray, netCDF4 or zarr is not installed.
    """

    def __init__(
        self,
        source: Any,
        *,
        variables: Sequence[str] | None = None,
        lead: int = 1,
        split: str = "train",
        holdout: float = 0.2,
        gap: int = 0,
        kind: str = "residual",
        nan: str = "mask",
        time_dim: str = "time",
        lat_dim: str = "lat",
        lon_dim: str = "lon",
        level_dim: str = "level",
    ) -> None:
        self.split = checked_split(split)
        self.kind, self.nan = _one_of("kind", kind, _KINDS), _one_of("nan", nan, _POLICIES)
        self.lead, self.gap = checked_count("lead", lead), checked_count("gap", gap, "an integer, at least 0", 0)
        self.holdout = checked_number("holdout", holdout, "a share in (0, 1)", lambda h: 0.0 < h < 1.0)
        self.time_dim, self.lat_dim, self.lon_dim, self.level_dim = time_dim, lat_dim, lon_dim, level_dim
        self.dataset = _opened(source)
        self._check_dimensions()
        self._times = self._checked_times()
        self.variables = self._checked_variables(variables)
        self.names = tuple(name for variable in self.variables for name in self._channels(variable))
        self.latitudes = self._latitudes()
        train = self._rows("train")
        self.mean, self.std, self.scale = self._statistics(train)
        self.rows = torch.from_numpy(train if split == "train" else self._rows(split))
        self.times = self._times[self.rows.numpy()]

    # the file

    def _check_dimensions(self) -> None:
        has = sorted(str(name) for name in self.dataset.dims)
        for dim in (self.time_dim, self.lat_dim, self.lon_dim):
            if dim not in has:
                raise ConfigError(
                    f"the data have no dimension {dim!r}, but {', '.join(has) or 'none'}.{nearest(dim, has)} Name "
                    f"yours with time_dim, lat_dim and lon_dim"
                )

    def _checked_times(self) -> np.ndarray:
        times: np.ndarray = self.dataset[self.time_dim].values
        if len(times) < 2:
            raise ConfigError(f"the data have {len(times)} times; a forecast needs at least two")
        steps = np.diff(times)
        odd = np.flatnonzero((steps != steps[0]) | (steps <= steps[0] * 0))
        if len(odd):
            at = int(odd[0])
            raise ConfigError(
                f"the times are unsorted or irregular: {times[at + 1]} follows {times[at]}, while the first step is "
                f"{steps[0]}; sort them and make the steps equal, with Dataset.sortby and .resample"
            )
        return times

    def _checked_variables(self, variables: Sequence[str] | None) -> tuple[str, ...]:
        needed = {self.time_dim, self.lat_dim, self.lon_dim}
        fields = [str(name) for name, array in self.dataset.data_vars.items() if needed <= set(array.dims)]
        chosen = fields if variables is None else list(variables)
        if isinstance(variables, str) or not chosen or len(set(chosen)) < len(chosen):
            raise ConfigError(f"variables={variables!r}; expected a list of unequal names out of {fields}")
        for name in chosen:
            if name not in self.dataset.data_vars:
                raise ConfigError(f"no variable {name!r}; the data have {fields}.{nearest(name, fields)}")
            _check_dims(name, self.dataset[name].dims, needed, self.level_dim)
        return tuple(chosen)

    def _channels(self, variable: str) -> list[str]:
        array = self.dataset[variable]
        if self.level_dim not in array.dims:
            return [variable]
        return [f"{variable}@{_plain(level)}" for level in array[self.level_dim].values]

    def _latitudes(self) -> Tensor:
        degrees = np.asarray(self.dataset[self.lat_dim].values, np.float64)
        if self.lat_dim not in self.dataset.coords or not (np.abs(degrees) <= 90.0).all():
            raise ConfigError(f"{self.lat_dim!r} holds no latitudes from -90 to 90 degrees; give it that coordinate")
        return torch.from_numpy(degrees.copy())

    def _rows(self, split: str) -> np.ndarray:
        """The times t whose t and t + lead are both in the split, int64."""
        count = len(self._times)
        cut = count - max(int(count * self.holdout), 1)
        begin, end = {"train": (0, cut), "test": (cut + self.gap, count), "all": (0, count)}[split]
        if end - begin <= self.lead:
            raise ConfigError(
                f"{split} has {max(end - begin, 0)} of {count} times (holdout={self.holdout:g}, gap={self.gap}), "
                f"which hold no pair lead={self.lead} apart; give more times"
            )
        return np.arange(begin, end - self.lead)

    def _read(self, rows: np.ndarray) -> Tensor:
        """x of the rows (in any order, repeated or not), float64 (b, C, H, W): each row is read once."""
        unique, place = np.unique(rows, return_inverse=True)
        parts = [self._variable(name, unique) for name in self.variables]
        return torch.from_numpy(np.concatenate(parts, axis=1)[place])

    def _variable(self, name: str, rows: np.ndarray) -> np.ndarray:
        """float64 (b, channels, H, W)."""
        levels = [self.level_dim] if self.level_dim in self.dataset[name].dims else []
        order = (self.time_dim, *levels, self.lat_dim, self.lon_dim)
        array = self.dataset[name].isel({self.time_dim: rows}).transpose(*order)
        values = np.asarray(array.values, np.float64)
        if self.nan == "refuse" and np.isnan(values).any():
            first = np.argwhere(np.isnan(values))[0]
            where = ", ".join(f"{dim}={_plain(array[dim].values[i])}" for dim, i in zip(order, first, strict=True))
            raise ConfigError(f"{name} is missing at {where}; fill it, or take nan='mask'")
        return values if levels else values[:, None]

    # the numbers

    def _statistics(self, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """mean, std and scale over the training period, read in pieces; each x once, but for the ends of pieces."""
        state, change = _Moments(), _Moments()
        last = int(rows[-1])
        for begin, end in _pieces(0, last + 1):
            piece = self._read(np.arange(begin, end + self.lead))
            new = piece if end == last + 1 else piece[: end - begin]
            state.add(new)
            change.add(piece[self.lead :] - piece[: end - begin])
        mean, std = state.mean(), state.std()
        scale = change.root_mean_square()
        self._check_constant("value", std)
        self._check_constant("change", scale)
        return mean, std, scale

    def _check_constant(self, what: str, spread: Tensor) -> None:
        bad = (~(spread > 0)).nonzero().flatten().tolist()  # NaN too
        if bad:
            raise ConfigError(
                f"channel {self.names[bad[0]]!r} has no known {what} or a constant one in the training period; "
                f"leave it out of variables"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Tensor) -> dict[str, Tensor]:
        rows = self.rows[checked_index(index, len(self), "FieldForecast")].numpy()
        both = self._read(np.concatenate((rows, rows + self.lead)))
        state, target = both[: len(rows)], both[len(rows) :]
        scaled = (target - state) / _grid(self.scale)
        if self.kind == "state":
            scaled = (target - _grid(self.mean)) / _grid(self.std)
        batch = {
            "sample": torch.nan_to_num(scaled, nan=0.0),
            "observation": scaled,
            "condition": self.condition(state),
            "state": state,
            "target": target,
        }
        return {name: value.to(torch.float32) for name, value in batch.items()}

    def condition(self, state_now: Tensor) -> Tensor:
        """The condition (…, C', H, W) of a forecast from ``state_now`` (…, C, H, W) in units, NaN where it is missing.

        C' = 2 C with ``nan="mask"``, C otherwise.
        """
        scaled = (state_now - _grid(self.mean).to(state_now)) / _grid(self.std).to(state_now)
        known = ~torch.isnan(scaled)
        parts = [torch.where(known, scaled, 0.0), *([known.to(scaled)] if self.nan == "mask" else [])]
        return torch.cat(parts, dim=-3)

    def restore(self, sample: Tensor, state: Tensor) -> Tensor:
        """x_{t+lead} in the units of the file, (…, C, H, W), from samples and states that broadcast.

        A residual leaves NaN where the state has it; a sample of the state does not use ``state``.
        """
        if self.kind == "state":
            return _grid(self.mean).to(sample) + _grid(self.std).to(sample) * sample
        return state + _grid(self.scale).to(sample) * sample

    def to_dataset(self, array: Tensor, times: Sequence[Any] | np.ndarray, member: Sequence[Any] | None = None) -> Any:
        """A forecast as an ``xarray.Dataset`` with the variables, attributes and coordinates of the file.

        Args:
            array: (M, T, C, H, W) in the units of the file.
            times: T values of the time coordinate, those that are forecast.
            member: M labels; None counts from 0.

        Returns:
            variables with the dimension ``member`` first, then those of the file in its order.

        Raises:
            ConfigError: shapes that do not fit.
        """
        import xarray

        grid = (len(self.names), len(self.latitudes), self.dataset.sizes[self.lon_dim])
        labels = range(len(array)) if member is None else member
        if array.ndim != 5 or tuple(array.shape) != (len(labels), len(times), *grid):
            raise ConfigError(f"array has {got(array)}; expected {(len(labels), len(times), *grid)}: (M, T, C, H, W)")
        values, found, at = array.detach().cpu().numpy(), {}, 0
        for name in self.variables:
            width = len(self._channels(name))
            found[name] = self._variable_out(name, values[:, :, at : at + width])
            at += width
        template = self.dataset[list(self.variables)]
        coords = {key: c for key, c in template.coords.items() if self.time_dim not in c.dims}
        return xarray.Dataset(
            found, coords={"member": list(labels), self.time_dim: np.asarray(times), **coords}, attrs=template.attrs
        )

    def _variable_out(self, name: str, values: np.ndarray) -> Any:
        """One variable (M, T, its channels, H, W) in the file's order of dimensions, as an ``xarray.Variable``."""
        import xarray

        like = self.dataset[name]
        levels = [self.level_dim] if self.level_dim in like.dims else []
        dims = ("member", self.time_dim, *levels, self.lat_dim, self.lon_dim)
        variable = xarray.Variable(dims, values if levels else values[:, :, 0], attrs=like.attrs)
        return variable.transpose("member", *like.dims)


class _Moments:
    """Running sums of the known values of each channel, about the first piece's mean so that no digits are lost."""

    def __init__(self) -> None:
        self.shift = self.count = self.total = self.squares = torch.zeros(())

    def add(self, values: Tensor) -> None:
        """Takes (n, C, H, W), NaN where unknown."""
        if self.shift.ndim == 0:
            self.shift = torch.nan_to_num(values.nanmean(dim=(0, 2, 3)), nan=0.0)
        known = ~torch.isnan(values)
        about = torch.where(known, values - _grid(self.shift), 0.0)
        self.count = self.count + known.sum(dim=(0, 2, 3))
        self.total = self.total + about.sum(dim=(0, 2, 3))
        self.squares = self.squares + about.square().sum(dim=(0, 2, 3))

    def mean(self) -> Tensor:
        return self.shift + self.total / self.count

    def std(self) -> Tensor:
        mean = self.total / self.count
        return (self.squares / self.count - mean.square()).clamp_min(0.0).sqrt()

    def root_mean_square(self) -> Tensor:
        return (self.std().square() + self.mean().square()).sqrt()


def _grid(channels: Tensor) -> Tensor:
    return channels.reshape(-1, 1, 1)


def _pieces(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for start in range(begin, end, _CHUNK):
        yield start, min(start + _CHUNK, end)


def _plain(value: Any) -> str:
    """A coordinate as text: 500 rather than 500.0, and times as they are."""
    return f"{value:g}" if np.issubdtype(np.asarray(value).dtype, np.number) else str(value)


def _one_of(name: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.{nearest(value, allowed)}")
    return value


def _check_dims(name: str, dims: Sequence[Any], needed: set[str], level: str) -> None:
    found = {str(dim) for dim in dims}
    missing, other = sorted(needed - found), sorted(found - needed - {level})
    if missing:
        raise ConfigError(f"{name!r} has the dimensions {tuple(dims)}, without {', '.join(missing)}; leave it out")
    if other:
        raise ConfigError(
            f"{name!r} has the dimension {other[0]!r} beside {', '.join(sorted(needed))} and {level!r}; name the "
            f"levels with level_dim={other[0]!r}, or select one of it first"
        )


def _opened(source: Any) -> Any:
    """The ``xarray.Dataset`` of a file or a store, not read yet; one that is open already is returned."""
    try:
        import xarray
    except ImportError as error:
        raise MissingExtraError("FieldForecast needs xarray; install genkit-diffusion[weather]") from error
    if isinstance(source, xarray.Dataset):
        return source
    if not isinstance(source, (str, Path)):
        raise ConfigError(f"source has {got(source)}; expected a path or an xarray.Dataset")
    path = Path(source).expanduser()
    if not path.exists():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(f"no file or folder {path}.{nearest(path.name, siblings)} Give a netCDF file or a zarr store")
    needs = "zarr" if path.is_dir() else "netCDF4"
    if path.is_dir():
        _check_store(path)
    try:
        return xarray.open_dataset(path, engine=needs.lower())
    except (ImportError, ModuleNotFoundError) as error:
        raise _missing(needs) from error
    except Exception as error:  # each backend has errors of its own
        if not _installed(needs):
            raise _missing(needs) from error
        raise ConfigError(f"{path} is neither a netCDF file nor a zarr store ({error}); convert it") from error


def _installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def _missing(package: str) -> MissingExtraError:
    remedy = "run `pip install zarr`" if package == "zarr" else "install genkit-diffusion[weather]"
    return MissingExtraError(f"this source is read with {package}, which is not installed; {remedy}")


def _check_store(path: Path) -> None:
    """Refuses a folder that is no zarr store, and a store whose codecs run code while they read."""
    places = [path / name for name in _DESCRIPTIONS] + [p for name in _DESCRIPTIONS for p in path.glob(f"*/{name}")]
    described = [place for place in places if place.is_file()]
    if not described:
        raise ConfigError(f"{path} is a folder without a zarr store in it; give a netCDF file or a zarr store")
    for file in described:
        try:
            unsafe = _names_unsafe_codec(json.loads(file.read_bytes()))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file} is damaged ({error}); write the store again") from error
        if unsafe:
            raise ConfigError(f"{file} asks for the codec pickle, which runs code of the file; store plain numbers")


def _names_unsafe_codec(value: Any) -> bool:
    if isinstance(value, dict):
        named = [value.get(key) for key in ("id", "name")]
        return any(codec in _UNSAFE_CODECS for codec in named) or any(map(_names_unsafe_codec, value.values()))
    return isinstance(value, list) and any(map(_names_unsafe_codec, value))
