"""The clock-conditioned denoiser: exact preconditioning around a network that never sees an unbounded number.

Differs from the paper in: everything here; only the paper's abstract is public. See this folder's README.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor

from genkit.errors import ConfigError
from genkit.models.mlp import ConditionalMLP
from genkit.models.precision import FixedPrecision
from genkit.pipelines.heavy_tailed_flow.clocks import Clock
from genkit.pipelines.heavy_tailed_flow.features import ClockFeatures
from genkit.schedulers.transition import expand_as

#: how many of the largest radii are too few to say where a quantile lies
_TAIL_COUNT = 32

__all__ = ["ClockDenoiser", "ConditionalScale", "DataTransform", "soft_clip"]


class DataTransform(FixedPrecision):
    """An affine change of variables, data = location + L · standardised, fitted to the training data.

    Args:
        channels: size d of a datum.
    """

    location: Tensor
    factor: Tensor
    inverse: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("location", torch.zeros(channels))
        self.register_buffer("factor", torch.eye(channels))
        self.register_buffer("inverse", torch.eye(channels))

    def fit(self, data: Tensor, kind: str) -> None:
        """Sets the transform: ``"whiten"`` (mean and Cholesky factor of the covariance), ``"mad"`` (median, and one
        scale, the median absolute deviation of all coordinates) or ``"none"``.

        Raises:
            ConfigError: NaN or infinite rows (counted), fewer rows than columns, another number of columns than the
                network's, an unknown kind, no spread, or columns that determine one another.
        """
        data = data.to(torch.float64)
        _check_data(data, len(self.location))
        if kind == "whiten":
            location = data.mean(dim=0)
            factor = _cholesky(torch.cov(data.T).reshape(data.shape[1], data.shape[1]))
        elif kind == "mad":
            location = data.median(dim=0).values
            # 0.6745 is the median of |N(0, 1)|
            spread = (data - location).abs().median() / 0.6745
            if not spread > 0:
                raise ConfigError(
                    "transform='mad': more than half of the numbers equal their column's median, so the spread is 0; "
                    "use 'whiten' or 'none'"
                )
            factor = torch.eye(data.shape[1], dtype=data.dtype) * spread
        elif kind == "none":
            location, factor = torch.zeros_like(data[0]), torch.eye(data.shape[1], dtype=data.dtype)
        else:
            raise ConfigError(f"transform={kind!r} is unknown; expected 'whiten', 'mad' or 'none'")
        self.location.copy_(location)
        self.factor.copy_(factor)
        self.inverse.copy_(torch.linalg.inv(factor))

    def standardise(self, data: Tensor) -> Tensor:
        """(B, d) data → (B, d) standardised."""
        return (data - self.location.to(data.dtype)) @ self.inverse.T.to(data.dtype)

    def restore(self, standardised: Tensor) -> Tensor:
        """(B, d) standardised → (B, d) data."""
        return self.location.to(standardised.dtype) + standardised @ self.factor.T.to(standardised.dtype)


class ConditionalScale(FixedPrecision):
    """s(A) = sqrt(E[|x_0|² | A] / d): the data's size given the clock, in standardised units.

    For independent coupling it is one number. For rank coupling it is the data-radius quantile at the clock's
    quantile, over √d, interpolated in log-log; beyond the 32nd largest radius it grows as √A.

    Args:
        knots: number of interpolation points.
    """

    log_clock: Tensor
    log_scale: Tensor

    def __init__(self, knots: int = 64) -> None:
        super().__init__()
        self.register_buffer("log_clock", torch.arange(knots, dtype=torch.float64))
        self.register_buffer("log_scale", torch.zeros(knots, dtype=torch.float64))

    def fit_constant(self, standardised: Tensor) -> None:
        """s = the root mean square of all coordinates (winsorised at the 99.9 % radius, which infinite variance
        needs).
        """
        radius = standardised.to(torch.float64).norm(dim=1)
        radius = radius.clamp(max=float(torch.quantile(radius, 0.999)))
        rms = radius.square().mean().sqrt() / math.sqrt(standardised.shape[1])
        self.log_scale.fill_(float(rms.log()))

    def fit_rank(self, standardised: Tensor, clock: Clock) -> None:
        """The quantile-to-quantile curve from the clock's law to the data's radius.

        Knots are evenly spaced in logit(u) from u = 1 % to the 32nd largest radius. Beyond them s ∝ √A, so that the
        samples' tail index is the clock's, whatever law it is drawn from.
        """
        radius = standardised.to(torch.float64).norm(dim=1)
        if not float(torch.quantile(radius, 0.01)) > 0:
            raise ConfigError(
                "coupling='rank' orders the data by size, but at least 1 % of them have size 0 in standardised units; "
                "use coupling='independent', or leave the zeros to a model of their own"
            )
        end = 1.0 - min(0.05, _TAIL_COUNT / len(radius))
        logits = torch.linspace(math.log(0.01 / 0.99), math.log(end / (1.0 - end)), len(self.log_clock) - 1)
        u = torch.sigmoid(logits.to(torch.float64))
        log_clock, log_radius = clock.quantile(u).log(), torch.quantile(radius, u).log()
        log_scale = log_radius - 0.5 * math.log(standardised.shape[1])
        self.log_clock.copy_(torch.cat((log_clock, log_clock[-1:] + 1.0)))
        self.log_scale.copy_(torch.cat((log_scale, log_scale[-1:] + 0.5)))

    def forward(self, clock: Tensor) -> Tensor:
        """A (B, …) → s(A), of the same shape, float64."""
        x = clock.to(self.log_clock.dtype).log()
        index = torch.searchsorted(self.log_clock, x.contiguous()).clamp(1, len(self.log_clock) - 1)
        x0, x1 = self.log_clock[index - 1], self.log_clock[index]
        y0, y1 = self.log_scale[index - 1], self.log_scale[index]
        y = y0 + (y1 - y0) * (x - x0).clamp(min=0.0) / (x1 - x0)  # constant below the first knot
        return torch.exp(y)


class ClockDenoiser(ModelMixin, ConfigMixin):
    """v_θ(x, t | clock) = c_skip x + c_out F_θ(c_in x, t, φ(clock)), the ``flow`` prediction √A ε − x_0.

    With s = s(A) and D = (1 − t)² s² + t² A::

        c_skip = (t A − (1 − t) s²)/D,     c_out = √A s/√D,     c_in = 1/√D

    so that F_θ = 0 is the exact velocity of Gaussian data of size s, and the residual has unit variance at every (t,
    A). Not in the paper's abstract; the derivation is in this folder's README.

    Args:
        channels: size d of a datum.
        clock: the training law, as ``Clock.to_dict()``.
        grid: number of cells of the clock path.
        depth: depth of its log-signature.
        path_feature: ``"logsignature"`` or ``"terminal"`` (functions of A alone).
        width, blocks: size of the network.
        num_classes: number of class labels, 0 for none.
        coupling: how clocks and data were paired in training: ``"independent"`` or ``"rank"``.
    """

    prediction_type = "flow"

    @register_to_config
    def __init__(
        self,
        channels: int,
        clock: Mapping[str, Any],
        grid: int = 16,
        depth: int = 3,
        path_feature: str = "logsignature",
        width: int = 128,
        blocks: int = 3,
        num_classes: int = 0,
        coupling: str = "rank",
    ) -> None:
        super().__init__()
        self.clock = Clock.from_dict(clock)
        self.transform = DataTransform(channels)
        self.conditional_scale = ConditionalScale()
        self.features = ClockFeatures(self.clock, grid=grid, depth=depth, path_feature=path_feature)
        self.network = ConditionalMLP(channels, self.features.channels, width, blocks, num_classes)

    def fit(self, data: Tensor, transform: str, conditional: bool = True) -> None:
        """Fits the data transform and the scale s(A) to the training data (B, d); ``conditional=False`` keeps s
        constant.
        """
        self.transform.fit(data, transform)
        standardised = self.transform.standardise(data.to(torch.float64))
        if conditional and self.config["coupling"] == "rank" and math.isfinite(self.clock.tail_index):
            self.conditional_scale.fit_rank(standardised, self.clock)
        else:
            self.conditional_scale.fit_constant(standardised)

    def coefficients(self, t: Tensor, clock: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """c_skip, c_out, c_in at times t (B,) and clocks A (B,), float64 (B,)."""
        t, a = t.to(torch.float64), clock.to(torch.float64)
        s2 = self.conditional_scale(a).square()
        signal = (1.0 - t) * s2
        d = (1.0 - t) * signal + t.square() * a
        return (t * a - signal) / d, torch.sqrt(a * s2 / d), torch.rsqrt(d)

    def forward(self, x: Tensor, t: Tensor, cond: Mapping[str, Tensor] | None = None) -> Tensor:
        """Velocity of standardised samples.

        Args:
            x: (B, d) standardised.
            t: (B,) in [0, 1].
            cond: ``clock`` A (B,), ``features`` (B, F), and ``class_labels`` int64 (B,) for a class-conditional
                network.
        """
        if cond is None or "clock" not in cond or "features" not in cond:
            raise ConfigError(f"ClockDenoiser needs cond with 'clock' and 'features'; got {sorted(cond or {})}")
        c_skip, c_out, c_in = (expand_as(c, x) for c in self.coefficients(t, cond["clock"]))
        inner = self.network(soft_clip(c_in * x), t, cond["features"], cond.get("class_labels"))
        return c_skip * x + c_out * inner.to(x.dtype)


def soft_clip(x: Tensor, limit: float = 3.0) -> Tensor:
    """x up to |x| = limit, then sign(x) (limit + log(1 + |x| − limit)): continuous with slope 1."""
    size = x.abs()
    return torch.where(size <= limit, x, x.sign() * (limit + torch.log1p((size - limit).clamp(min=0.0))))


def _cholesky(covariance: Tensor) -> Tensor:
    """The lower Cholesky factor; a column that the ones before it determine is a `ConfigError`, not a huge inverse."""
    factor, failed = torch.linalg.cholesky_ex(covariance)
    share = factor.diagonal() / covariance.diagonal().sqrt()  # of each column's deviation, what is its own
    if bool(failed) or float(share.min()) < 1e-6:
        raise ConfigError(
            "transform='whiten': the training data's columns determine one another (a singular covariance); leave the "
            "repeated column out, or use transform='mad'"
        )
    return factor


def _check_data(data: Tensor, channels: int) -> None:
    if data.ndim != 2 or len(data) <= data.shape[-1]:
        raise ConfigError(f"training data has shape {tuple(data.shape)}; expected (n, d) with n > d")
    if data.shape[1] != channels:
        raise ConfigError(f"training data has {data.shape[1]} columns, the network {channels} channels")
    bad = int((~torch.isfinite(data)).any(dim=1).sum())
    if bad:
        raise ConfigError(
            f"training data has {bad} of {len(data)} rows with NaN or infinite values; remove or mend them"
        )
    if float(data.std(dim=0).min()) == 0.0:
        raise ConfigError("training data has a constant column; remove it")
