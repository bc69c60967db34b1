r"""The two-level Lorenz-96 system, of which a forecaster sees the slow level only: chaos whose truth is unlimited.

K slow variables X and J fast ones Y for each of them, all on one circle of K J (indices wrap)::

    dX_k/dt = -X_{k-1} (X_{k-2} - X_{k+1}) - X_k + F - (h c / b) Σ_j Y_{j,k}
    dY_i/dt = -c b Y_{i+1} (Y_{i+2} - Y_{i-1}) - c Y_i + (h c / b) X_{⌊i / J⌋}

with i = J k + j counted along the circle. The fast variables are not seen, so X_{t + lead} given X_t is random. Without
fast variables (``num_fast=0``) it is the one-level system, dX_k/dt = (X_{k+1} - X_{k-2}) X_{k-1} - X_k + F.

The defaults, K = 8, J = 32, h = 1, F = 20, b = 10, c = 4, are the harder setting of Arnold et al. Not in the papers: an
optional white noise on the slow variables, σ dW, which makes the transition random by a known amount.

References: Lorenz, "Predictability: a problem partly solved", ECMWF seminar 1996; Wilks, "Effects of stochastic
parametrizations in the Lorenz '96 system", Q. J. R. Meteorol. Soc. 2005, equations 1-2; Arnold, Moroz, Palmer,
"Stochastic parametrizations and model uncertainty in the Lorenz '96 system", Phil. Trans. R. Soc. A 2013.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from genkit._checks import checked_count, checked_number, got
from genkit.data.splits import checked_split
from genkit.data.text import checked_index
from genkit.errors import ConfigError

__all__ = ["Lorenz96", "TwoLevelSystem", "advection"]

_DEFAULT_SIZE = {"train": 20_000, "validation": 4_000, "test": 4_000}
_SCALE_TRAJECTORIES, _SCALE_TIMES = 200, 8  # what mean, std and scale are estimated from


def advection(y: Tensor, out: Tensor | None = None) -> Tensor:
    """y_{i+1} (y_{i-1} - y_{i+2}) of n >= 4 variables on a circle, (n, P). It keeps Σ y²: Σ y_i · advection_i = 0."""
    out = torch.empty_like(y) if out is None else out
    torch.sub(y[:-3], y[3:], out=out[1:-2])
    out[1:-2].mul_(y[2:-1])
    seam = torch.cat((y[-3:], y[:3]))  # the three rows whose neighbours lie across it
    edge = seam[2:5] * (seam[:3] - seam[3:])
    out[-2:], out[0] = edge[:2], edge[2]
    return out


@dataclass(frozen=True)
class TwoLevelSystem:
    """The equations and their integration. A state is float64 (K + K J, P): P trajectories, slow variables first.

    Args:
        num_slow: K >= 4.
        num_fast: J, fast variables for each slow one; 0 for the one-level system.
        forcing: F.
        coupling: h.
        time_ratio: c, how much faster the fast level is.
        amplitude_ratio: b, how much smaller it is.
        noise: σ >= 0 of the white noise on the slow variables, in their unit per √time.

    Raises:
        ConfigError: a number outside its range.
    """

    num_slow: int = 8
    num_fast: int = 32
    forcing: float = 20.0
    coupling: float = 1.0
    time_ratio: float = 4.0
    amplitude_ratio: float = 10.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        checked_count("num_slow", self.num_slow, "an integer, at least 4", 4)
        checked_count("num_fast", self.num_fast, "an integer, at least 0", 0)
        for name in ("forcing", "coupling"):
            checked_number(name, getattr(self, name), "a finite number", math.isfinite)
        for name in ("time_ratio", "amplitude_ratio"):
            checked_number(name, getattr(self, name), "a positive number", lambda v: 0.0 < v < math.inf)
        checked_number("noise", self.noise, "a number, at least 0", lambda v: 0.0 <= v < math.inf)

    def tendency(self, state: Tensor, out: Tensor | None = None) -> Tensor:
        """d(state)/dt without the noise, into ``out`` where it is given."""
        out = torch.empty_like(state) if out is None else out
        slow, change = state[: self.num_slow], out[: self.num_slow]
        change.copy_(advection(slow.flip(0)).flip(0)).sub_(slow).add_(self.forcing)  # the slow level runs the other way
        if self.num_fast:
            self._fast_tendency(state, out)
        return out

    def _fast_tendency(self, state: Tensor, out: Tensor) -> None:
        """Writes dY/dt and takes the coupling off dX/dt."""
        k, c, b = self.num_slow, self.time_ratio, self.amplitude_ratio
        exchange, blocks = self.coupling * c / b, (k, self.num_fast, state.shape[1])
        slow, fast = state[:k], state[k:]
        out[:k].sub_(fast.view(blocks).sum(dim=1), alpha=exchange)
        advection(fast, out[k:]).mul_(b).sub_(fast).mul_(c)
        out[k:].view(blocks).add_(slow.unsqueeze(1), alpha=exchange)

    def integrate(
        self, state: Tensor, duration: float, max_step: float = 0.01, generator: torch.Generator | None = None
    ) -> Tensor:
        """The state ``duration`` later, by Runge-Kutta steps of order 4, all equal and at most ``max_step`` long.

        Args:
            state: (K + K J, P); it is left as it is.
            duration: time, at least 0.
            max_step: > 0; the defaults are stable up to about 0.015.
            generator: of the noise, which is added after each step; needed where ``noise`` is above 0.

        Raises:
            ConfigError: the state is not finite any more (the step is too long), a state of another shape, noise
                without a generator.
        """
        rows = self.num_slow * (1 + self.num_fast)
        if state.ndim != 2 or state.shape[0] != rows:
            raise ConfigError(f"the state has {got(state)}; expected ({rows}, P), the {self.num_slow} slow rows first")
        if self.noise and generator is None:
            raise ConfigError(f"noise={self.noise:g} needs a generator; pass torch.Generator().manual_seed(seed)")
        steps = math.ceil(duration / max_step - 1e-9)
        step, rate, stage = duration / max(steps, 1), torch.empty_like(state), torch.empty_like(state)
        state = state.clone()
        for _ in range(steps):
            self._runge_kutta(state, step, rate, stage)
            if self.noise:
                kick = torch.randn(self.num_slow, state.shape[1], generator=generator, dtype=state.dtype)
                state[: self.num_slow].add_(kick, alpha=self.noise * math.sqrt(step))
        if not bool(state.isfinite().all()):
            raise ConfigError(f"the trajectories left all bounds with steps of {step:g}; take a smaller max_step")
        return state

    def _runge_kutta(self, state: Tensor, step: float, rate: Tensor, stage: Tensor) -> None:
        """One step in place; ``rate`` and ``stage`` are scratch: new memory would cost more than the arithmetic."""
        stage.copy_(state)
        start = state.clone()
        for weight, ahead in ((1 / 6, 1 / 2), (1 / 3, 1 / 2), (1 / 3, 1.0), (1 / 6, 0.0)):
            self.tendency(stage, rate)
            state.add_(rate, alpha=weight * step)
            if ahead:
                torch.add(start, rate, alpha=ahead * step, out=stage)

    def start(self, count: int, generator: torch.Generator) -> Tensor:
        """``count`` unequal states near the attractor, float64 (K + K J, count); they need a spin-up."""
        rows = self.num_slow * (1 + self.num_fast)
        state = torch.randn(rows, count, generator=generator, dtype=torch.float64)
        state[: self.num_slow].mul_(0.2).add_(0.2).mul_(self.forcing)
        state[self.num_slow :].mul_(self.forcing / (20.0 * self.amplitude_ratio))
        return state


class Lorenz96:
    r"""Pairs of slow states of :class:`TwoLevelSystem` as a map-style data set: ``data[index (b,)] -> {…}``.

    The two are ``lead`` apart. An item has, float32 (b, K) each,

    * ``sample``: r = (X_{t + lead} - X_t) / scale, and ``observation``, which equals it: all is seen;
    * ``condition``: (X_t - mean) / std;
    * ``state``: X_t, and ``target``: X_{t + lead}.

    The set is made at construction: trajectories side by side, a spin-up, then a pair each ``spacing``. Every split has
    trajectories of its own, and depends on the seed and the options alone. Mean, std and scale come from a third set of
    trajectories; they are one number each, as all K variables are alike, and equal for all splits and sizes.

    Args:
        split: ``"train"``, ``"validation"`` or ``"test"``.
        num_samples: pairs; None takes 20 000 for training, 4 000 otherwise.
        num_slow, num_fast, forcing, coupling, time_ratio, amplitude_ratio, noise: see :class:`TwoLevelSystem`.
        lead: time from state to target, > 0.
        spacing: time from a state to the next one of its trajectory, at least ``lead``.
        spin_up: time that is thrown away.
        num_trajectories: how many run side by side; fewer where there are fewer pairs.
        max_step: longest step of the integration.
        seed: an integer >= 0.

    Attributes:
        num_trajectories: of this split.  system: the equations.  names: ``x1`` to ``xK``.
        states, targets: float64 (n, K).  Row i is of trajectory i modulo their number.
        mean, std: float64 (K,), of X.  scale: float64 (K,), root mean square of X_{t + lead} - X_t.

    Raises:
        ConfigError: an unknown split, a number outside its range, a step too long; an index out of range.
    """

    def __init__(
        self,
        split: str = "train",
        *,
        num_samples: int | None = None,
        num_slow: int = 8,
        num_fast: int = 32,
        forcing: float = 20.0,
        coupling: float = 1.0,
        time_ratio: float = 4.0,
        amplitude_ratio: float = 10.0,
        noise: float = 0.0,
        lead: float = 0.2,
        spacing: float = 1.0,
        spin_up: float = 5.0,
        num_trajectories: int = 500,
        max_step: float = 0.01,
        seed: int = 0,
    ) -> None:
        self.split = checked_split(split, tuple(_DEFAULT_SIZE))
        size = checked_count("num_samples", _DEFAULT_SIZE[split] if num_samples is None else num_samples)
        self.system = TwoLevelSystem(num_slow, num_fast, forcing, coupling, time_ratio, amplitude_ratio, noise)
        self.lead, self.max_step, self.spin_up = (
            checked_number(name, value, "a positive number", lambda v: 0.0 < v < math.inf)
            for name, value in (("lead", lead), ("max_step", max_step), ("spin_up", spin_up))
        )
        self.spacing = checked_number("spacing", spacing, f"at least lead={lead}", lambda v: lead <= v < math.inf)
        self.seed = checked_count("seed", seed, "an integer, at least 0", 0)
        self.names = tuple(f"x{k + 1}" for k in range(num_slow))
        count = min(checked_count("num_trajectories", num_trajectories), size)
        self.num_trajectories = count
        self.states, self.targets, self._last = self._pairs(split, count, math.ceil(size / count))
        self.states, self.targets = self.states[:size], self.targets[:size]
        self.mean, self.std, self.scale = self._statistics()

    def _generator(self, purpose: str) -> torch.Generator:
        """Streams of two purposes or seeds are independent."""
        digest = hashlib.blake2b(f"lorenz96 {purpose} {self.seed}".encode(), digest_size=6).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "big"))

    def _pairs(self, purpose: str, count: int, times: int) -> tuple[Tensor, Tensor, Tensor]:
        """X_t and X_{t + lead}, (times · count, K), and the last full state."""
        generator, slow = self._generator(purpose), slice(self.system.num_slow)
        state = self._ahead(self.system.start(count, generator), self.spin_up, generator)
        states, targets = [], []
        for turn in range(times):
            if turn:
                state = self._ahead(state, self.spacing - self.lead, generator)
            states.append(state[slow].T.clone())
            state = self._ahead(state, self.lead, generator)
            targets.append(state[slow].T.clone())
        return torch.cat(states), torch.cat(targets), state

    def _ahead(self, state: Tensor, duration: float, generator: torch.Generator) -> Tensor:
        return self.system.integrate(state, duration, self.max_step, generator)

    def _statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        states, targets, _ = self._pairs("scale", _SCALE_TRAJECTORIES, _SCALE_TIMES)
        change = (targets - states).square().mean().sqrt()
        mean, std, scale = (value.expand(self.system.num_slow) for value in (states.mean(), states.std(), change))
        return mean, std, scale

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: Tensor) -> dict[str, Tensor]:
        rows = checked_index(index, len(self), "Lorenz96")
        state, target = self.states[rows], self.targets[rows]
        sample = ((target - state) / self.scale).to(torch.float32)
        return {
            "sample": sample,
            "condition": self.condition(state).to(torch.float32),
            "state": state.to(torch.float32),
            "target": target.to(torch.float32),
            "observation": sample.clone(),
        }

    def restore(self, sample: Tensor, state: Tensor) -> Tensor:
        """X_{t + lead} = X_t + scale · r, (…, K), from residuals and states that broadcast."""
        return state + self.scale.to(sample) * sample

    def condition(self, state_now: Tensor) -> Tensor:
        """The condition (…, K) of a forecast from ``state_now`` (…, K), in its dtype: for roll-outs of members."""
        if state_now.shape[-1:] != (len(self.names),):
            raise ConfigError(f"state_now has {got(state_now)}; expected (…, {len(self.names)})")
        return (state_now - self.mean.to(state_now)) / self.std.to(state_now)

    def truth(self, num_steps: int, count: int) -> Tensor:
        """Trajectories that go on where this split's end: X at 0, lead, … num_steps · lead.

        Args:
            num_steps: leads, at least 1.
            count: trajectories, at most those of the split (``num_trajectories``, 500 by default).

        Returns:
            float32 (num_steps + 1, count, K); row 0 is the state to start a forecast from.
        """
        steps, most = checked_count("num_steps", num_steps), self._last.shape[1]
        if checked_count("count", count) > most:
            raise ConfigError(f"count={count}, but the split has {most} trajectories; raise num_trajectories")
        generator, slow = self._generator(f"{self.split} truth"), slice(self.system.num_slow)
        state = self._last[:, :count].contiguous()
        seen = [state[slow].T]
        for _ in range(steps):
            state = self._ahead(state, self.lead, generator)
            seen.append(state[slow].T)
        return torch.stack(seen).to(torch.float32)
