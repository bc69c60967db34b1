"""Clock features: what a network is told about a sample's clock, as numbers of order one.

For a clock path T on a grid, with m the median of T_1 under the training law::

    L_s = log(1 + T_s/m)                       compressed, so that a huge clock does not make huge features
    f_w = log-signature of (s, L_s), word w    (the word 0 is the constant 1 and is dropped)
    g_w = sign(f_w) |f_w|^(1/q),  q = number of ones in w
    feature = clip((g_w - mean_w) / std_w, ±8) and, last, clip((log T_1 - mean) / std, ±8)

Means and deviations are those of 65,536 keyed paths of the training law, kept as buffers. A sampling law heavier than
the training one therefore only saturates features; :meth:`ClockFeatures.clipped_share` says how many.

Differs from the paper in: its abstract states truncated log-signature features of the path; grid, depth, compression
and normalisation are this project's choices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from genkit.errors import CheckpointError, ConfigError, nearest
from genkit.models.precision import FixedPrecision
from genkit.pipelines.heavy_tailed_flow.clocks import Clock
from genkit.pipelines.heavy_tailed_flow.logsignature import BACKENDS, clock_logsignature, logsignature, lyndon_words
from genkit.samplers.noise import training_keys

__all__ = ["ClockFeatures"]

_CLIP = 8.0
_LOG_RANGE = (-12.0, 25.0)  # of log T_1, before it is standardised
_CALIBRATION_PATHS = 65_536
_CALIBRATION_SEED = 0x68746D66  # any fixed number: the statistics belong to the law, not to a run
_KINDS = ("logsignature", "terminal")


class ClockFeatures(FixedPrecision):
    """Normalised log-signature features of clock paths.

    Args:
        clock: the training law: its median and its features' moments are the normaliser.
        grid: cells of the clock's path.
        depth: longest word of the log-signature.
        basis: "words" (:mod:`genkit.pipelines.heavy_tailed_flow.logsignature`).
        backend: "builtin" (closed form to depth 4), "pysiglib" or "signatory".
        path_feature: "logsignature", or "terminal" for the words of length 1 only, functions of T_1 alone.
        calibrate: False leaves the normaliser at mean 0 and deviation 1, for a state dict to fill.

    The state dict holds the normaliser and the configuration (as the bytes of its JSON); loading one that was made
    with another law, grid, depth, basis or path feature is refused. Buffers stay float32 in a half-precision model.

    Raises:
        ConfigError: an unknown basis, backend or path_feature, an impossible grid or depth.
        CheckpointError: on loading, a state dict of another configuration.
    """

    mean: Tensor
    std: Tensor
    config_json: Tensor

    def __init__(
        self,
        clock: Clock,
        grid: int = 16,
        depth: int = 3,
        basis: str = "words",
        backend: str = "builtin",
        path_feature: str = "logsignature",
        calibrate: bool = True,
    ) -> None:
        super().__init__()
        _check_choices(basis=(basis, ("words",)), backend=(backend, BACKENDS), path_feature=(path_feature, _KINDS))
        if not isinstance(grid, int) or grid < 1:
            raise ConfigError(f"grid is {grid!r}, expected the number of cells of the clock's path, at least 1")
        self.clock, self.grid, self.depth = clock, grid, depth
        self.basis, self.backend, self.path_feature = basis, backend, path_feature
        self.words = lyndon_words(2, depth if path_feature == "logsignature" else 1)[1:]
        self._longest = len(self.words[-1])
        mean, std = torch.zeros(self.channels), torch.ones(self.channels)
        if calibrate:
            moments = _moments(clock, grid, self._longest)
            mean, std = moments[0].to(mean), moments[1].to(std)
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.register_buffer("config_json", _to_bytes(self.to_dict()))

    @property
    def channels(self) -> int:
        """The number of features F: the Lyndon words but the word 0, and log T_1."""
        return len(self.words) + 1

    def to_dict(self) -> dict[str, Any]:
        """What the features mean: ready for JSON, pinned in the state dict (the backend does not change them)."""
        return {
            "clock": self.clock.to_dict(),
            "median": self.clock.median,
            "grid": self.grid,
            "depth": self.depth,
            "basis": self.basis,
            "path_feature": self.path_feature,
        }

    def forward(self, path: Tensor) -> Tensor:
        """Features of clock paths.

        Args:
            path: (B, grid + 1), T_0 = 0, non-decreasing; from any law, float64 or float32.

        Returns:
            float32 (B, F) in [-8, 8].
        """
        if path.ndim != 2 or path.shape[1] != self.grid + 1:
            raise ConfigError(
                f"clock paths have shape (B, {self.grid + 1}) for grid={self.grid}, got {tuple(path.shape)}"
            )
        raw = _raw_features(path, self.clock.median, self._longest, self.backend)
        return ((raw - self.mean.to(raw)) / self.std.to(raw)).clamp(-_CLIP, _CLIP).float()

    @staticmethod
    def clipped_share(features: Tensor) -> float:
        """The share of ``features`` (B, F) that sit on the clip at ±8.

        It says how far the paths' law leaves the training law; 0 for an empty batch.
        """
        return float((features.abs() >= _CLIP).float().sum()) / max(features.numel(), 1)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        stored = state_dict.get(f"{prefix}config_json")
        if stored is not None:
            _check_config(_from_bytes(stored), self.to_dict())
            # equal up to the median's last digits: this machine's stay
            state_dict = {**state_dict, f"{prefix}config_json": self.config_json}
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[no-untyped-call]


def _check_choices(**choices: tuple[str, tuple[str, ...]]) -> None:
    for name, (value, known) in choices.items():
        if value not in known:
            raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(known)}.{nearest(value, known)}")


def _raw_features(path: Tensor, median: float, depth: int, backend: str) -> Tensor:
    """g_w for the words after the word 0, then log T_1: (B, F) before standardising, float64."""
    path = path.double()
    compressed = torch.log1p(path / median)
    times = torch.linspace(0, 1, path.shape[1], dtype=torch.float64)
    if backend == "builtin":
        words = clock_logsignature(times, compressed, depth)
    else:
        both = torch.stack((times.to(path.device).expand_as(compressed), compressed), dim=-1)
        words = logsignature(both, depth, backend=backend)
    ones = torch.tensor([sum(w) for w in lyndon_words(2, depth)[1:]], dtype=path.dtype, device=path.device)
    levelled = words[:, 1:].sign() * words[:, 1:].abs() ** (1 / ones)
    log_terminal = path[:, -1:].log().clamp(*_LOG_RANGE)
    return torch.cat((levelled, log_terminal), dim=1)


@lru_cache(maxsize=16)
def _moments(clock: Clock, grid: int, depth: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (F,) of the features under the law; a constant feature gets the deviation 1."""
    with torch.device("cpu"):  # whatever default device the network is built under
        keys = training_keys(_CALIBRATION_SEED, 0, torch.arange(_CALIBRATION_PATHS))
        raw = _raw_features(clock.path(keys.at(purpose="clock"), grid), clock.median, depth, "builtin")
        std, mean = torch.std_mean(raw, dim=0)
        return mean, torch.where(std < 1e-6, 1.0, std)


def _to_bytes(config: Mapping[str, Any]) -> Tensor:
    text = json.dumps(config, sort_keys=True).encode()
    text += b" " * (-len(text) % 1024)  # a fixed size: loaders compare shapes, and the median's digits may differ
    return torch.tensor(list(text), dtype=torch.uint8, device="cpu")


def _from_bytes(stored: Tensor) -> dict[str, Any]:
    try:
        return json.loads(bytes(stored.cpu().tolist()))
    except ValueError as error:
        raise CheckpointError(f"the clock features' stored configuration is not JSON ({error})") from error


def _check_config(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuses features of another meaning; the median may differ in its last digits between machines."""
    for key, value in wanted.items():
        got = stored.get(key)
        if key == "median" and isinstance(got, float) and abs(got - value) <= 1e-9 * value:
            continue
        if got != value:
            raise CheckpointError(
                f"the checkpoint's clock features were made with {key} = {got!r}, this network has {key} = {value!r}; "
                f"build it with the checkpoint's value (features cannot be converted)"
            )
