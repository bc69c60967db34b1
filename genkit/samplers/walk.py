"""The straight walk: from noise to data, one step after the other, with gradients where they are wanted."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as checkpoint_call

from genkit._checks import check_same_shape, checked_changes, checked_count, checked_shape, got
from genkit.errors import ConfigError, nearest
from genkit.samplers.noise import Keys, draw_keys
from genkit.samplers.solvers import (
    AncestralSolver,
    ChainSolver,
    Cond,
    Denoiser,
    EulerSolver,
    Solver,
    SolverState,
    make_solver,
)

__all__ = ["RolloutOutput", "rollout"]

Context = Mapping[str, Tensor]
Callback = Callable[[int, float, dict[str, Any]], Mapping[str, Any] | None]


@dataclass(frozen=True)
class RolloutOutput:
    """What a walk returns.

    Args:
        sample: the final state, (B, \\*) (a dict of tensors where the state has parts).
        x0: the clean prediction at the last network call, (B, \\*); equal to ``sample`` where the walk ends with an
            Euler step onto t = 0. None where the scheduler cannot tell (a stateful diffusers scheduler).
        trajectory: the states of all times, (n + 1, B, \\*), or None.
        log_probs: log p(x_s | x_t) of each step in nats, (B, n), NaN for deterministic steps, or None.
    """

    sample: Any
    x0: Any
    trajectory: Any = None
    log_probs: Tensor | None = None


def rollout(
    denoiser: Denoiser,
    scheduler: Any,
    x: Any = None,
    *,
    num_inference_steps: int | None = None,
    shape: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    cond: Cond = None,
    context: Context | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | Keys | None = None,
    times: Tensor | Sequence[float] | None = None,
    eta: float | None = None,
    solver: str | Solver = "euler",
    grad_steps: int | Sequence[int] = 0,
    input_grad: bool = True,
    checkpoint: bool = False,
    stop_at: int | None = None,
    return_trajectory: bool = False,
    return_log_probs: bool = False,
    callback_on_step_end: Callback | None = None,
    compile: bool = False,
    progress: bool = False,
) -> RolloutOutput:
    """Walks a batch down the chain and returns where it ends.

    The walk first draws one key per sample from ``generator``; all its noise, the start included, is a function of
    that key, so a sample does not depend on the batch it is in.

    Args:
        denoiser: (x_t, t, cond) → model output; its ``prediction_type``, if it has one, must be the scheduler's.
        scheduler: the chain (``FlowScheduler``, ``VPScheduler``, ``ProductScheduler``, or ``DiffusersScheduler``).
        x: the state to start from, (B, \\*), or None to draw ``scheduler.prior``. Half precision is kept for what the
            network sees and for the result; the state itself is at least float32.
        num_inference_steps: number of steps n (or give ``times``).
        shape: shape of the state (B, \\*) when ``x`` is None; one a field where the state has parts.
        cond: what the denoiser is told, tensors with batch size B.
        context: what the kernel needs per sample, tensors with batch size B: the names in the scheduler's
            ``context_names`` (``"scale"``, finite and not negative, for the Gaussian ones).
        generator: one generator, one per sample, or :class:`~genkit.samplers.Keys` (in training); None is torch's
            global generator.
        times: the n + 1 times, strictly decreasing, in [0, 1] (None: ``scheduler.times(n)``); rounded to float32.
        eta: stochasticity of the solver ``"ancestral"``, from 0 to 1 (None: the scheduler's).
        solver: a name of :data:`~genkit.samplers.solvers.SOLVERS` or a :class:`~genkit.samplers.solvers.Solver`.
            Multi-stage solvers end with an Euler step where the walk ends at t = 0.
        grad_steps: the steps whose network calls are differentiated: the last K, or explicit step indices. Before the
            first of them no graph is built; in steps between them the network's output counts as a constant. Gradients
            with respect to ``x`` itself flow only if step 0 is in the window.
        input_grad: False cuts the gradient through the network's input (only the direct path of the state remains).
        checkpoint: recompute the network's activations in the backward pass instead of keeping them.
        stop_at: end the walk at this step with an Euler step from its time onto t = 0 (the one-step clean prediction).
        return_trajectory: also return the states of all times.
        return_log_probs: also return the log-density of each step (solvers ``"euler"`` and ``"ancestral"``).
        callback_on_step_end: called as ``callback(step, t, {"sample": …, "x0": …})`` after each step; a returned
            mapping with ``"sample"`` (of the same shape, type and device) replaces the state.
        compile: run the step through ``torch.compile(fullgraph=True)``.
        progress: show a progress bar.

    Raises:
        ConfigError: arguments that cannot mean what they say or contradict each other, or a denoiser or callback that
            returns something else than a tensor of the state's shape; the message names it.
    """
    solver = make_solver(solver, eta)
    _check_callables(denoiser, scheduler, callback_on_step_end)
    _check_prediction_type(denoiser, scheduler)
    _check_solver(solver, scheduler, own_times=times is not None or stop_at is not None)
    if return_log_probs and not isinstance(solver, (EulerSolver, AncestralSolver)):
        raise ConfigError(
            f"return_log_probs needs a one-evaluation step of the kernel (solver 'euler' or 'ancestral'); "
            f"{type(solver).__name__} has no density"
        )
    grid = _walk_times(scheduler, num_inference_steps, times, stop_at)
    window = _window(grad_steps, len(grid) - 1)
    x, keys = _start(scheduler, x, shape, generator, context, cond)
    walk = _Walk(denoiser, scheduler, solver, cond, context, keys, grid, window, input_grad, checkpoint, compile)
    first, recording = min(window, default=len(grid) - 1), torch.is_grad_enabled() and bool(window)

    result_dtype = _dtype_of(x)
    walk.network_dtype = result_dtype if result_dtype in (torch.float16, torch.bfloat16) else None
    x = _map(x, lambda v: v.float() if v.dtype in (torch.float16, torch.bfloat16) else v)
    state = solver.init(x)
    trajectory = [x] if return_trajectory else None
    log_probs: list[Tensor] | None = [] if return_log_probs else None
    for step in _progress(len(grid) - 1, progress):
        with torch.set_grad_enabled(recording and step >= first):
            x, state = walk.advance(step, x, state)
            if log_probs is not None:
                log_probs.append(_log_prob(state.transition, x))
            if callback_on_step_end is not None:
                x = _call_back(callback_on_step_end, step, grid, x, walk.clean(state))
        if trajectory is not None:
            trajectory.append(x)
    with torch.set_grad_enabled(recording):
        clean = walk.clean(state)
    return RolloutOutput(
        sample=_map(x, lambda v: v.to(result_dtype) if v.is_floating_point() and walk.network_dtype else v),
        x0=clean,
        trajectory=None if trajectory is None else _stack(trajectory),
        log_probs=None if log_probs is None else torch.stack(log_probs, dim=1),
    )


@dataclass
class _Walk:
    """The fixed arguments of one walk."""

    denoiser: Denoiser
    scheduler: Any
    solver: Solver
    cond: Cond
    context: Context | None
    keys: Keys
    grid: Tensor
    window: frozenset[int]
    input_grad: bool
    checkpoint: bool
    compile: bool
    network_dtype: torch.dtype | None = None

    def advance(self, step: int, x: Any, state: SolverState) -> tuple[Any, SolverState]:
        device = _device_of(x)
        t, s = (self.grid[i].to(device).expand(len(self.keys)) for i in (step, step + 1))
        ends = float(self.grid[step + 1]) == 0.0
        solver = EulerSolver() if ends and self.solver.evaluations > 1 else self.solver
        noise = self.keys.at(step=step, purpose="transition") if solver.stochastic else None
        past = SolverState(history=state.history)  # the last step's evaluation is the walk's, not the next step's
        advance = _compiled_step if self.compile else _advance
        return advance(solver, self._denoiser(step), self.scheduler, x, t, s, past, self.cond, self.context, noise)

    def _denoiser(self, step: int) -> Denoiser:
        """The network as this step may see it: with the right dtype, inside or outside the gradient window."""
        active = step in self.window
        plain = self.network_dtype is None and not hasattr(self.scheduler, "model_input")
        if plain and (not torch.is_grad_enabled() or (active and self.input_grad and not self.checkpoint)):
            return _Float32Time(self.denoiser)
        return _WindowedDenoiser(
            _Float32Time(self.denoiser),
            getattr(self.scheduler, "model_input", None),
            self.network_dtype,
            active,
            self.input_grad,
            self.checkpoint and active and torch.is_grad_enabled(),
        )

    def clean(self, state: SolverState) -> Any:
        """The clean prediction of the last network call."""
        if state.evaluation is None or hasattr(self.scheduler, "model_input"):
            return None
        output, t, x = state.evaluation
        return self.scheduler.to_x0(output, t, x, self.context)


@dataclass(frozen=True)
class _Float32Time:
    """Tells the network the time in float32 (the walk's times are representable in it)."""

    denoiser: Denoiser

    def __call__(self, x: Any, t: Tensor, cond: Cond = None) -> Any:
        return self.denoiser(x, t.to(torch.float32), cond)


@dataclass(frozen=True)
class _WindowedDenoiser:
    """A network call with the walk's dtype, and with the gradient that its step is entitled to."""

    denoiser: Denoiser
    model_input: Callable[[Any, Tensor], Any] | None
    dtype: torch.dtype | None
    active: bool
    input_grad: bool
    checkpoint: bool

    def __call__(self, x: Any, t: Tensor, cond: Cond = None) -> Any:
        if self.model_input is not None:
            x = self.model_input(x, t)
        if not (self.active and self.input_grad):
            x = _map(x, lambda v: v.detach())
        if self.dtype is not None:
            x = _map(x, lambda v: v.to(self.dtype) if v.is_floating_point() else v)
        if self.checkpoint:
            return checkpoint_call(self.denoiser, x, t, cond, use_reentrant=False)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.active):
            return self.denoiser(x, t, cond)


def _advance(
    solver: Solver,
    denoiser: Denoiser,
    scheduler: Any,
    x: Any,
    t: Tensor,
    s: Tensor,
    state: SolverState,
    cond: Cond,
    context: Context | None,
    noise: Keys | None,
) -> tuple[Any, SolverState]:
    """One step; a module-level function, so that compiled code is shared by all walks."""
    return solver.step(denoiser, scheduler, x, t, s, state, cond, context, noise)


@functools.cache
def _compiled_advance() -> Callable[..., Any]:
    return torch.compile(_advance, fullgraph=True)


def _compiled_step(*arguments: Any) -> tuple[Any, SolverState]:
    try:
        return _compiled_advance()(*arguments)
    except torch._dynamo.exc.Unsupported:
        _advance(*arguments)  # an error of ours inside is "unsupported" to the compiler: let it speak for itself
        raise


def _check_callables(denoiser: Any, scheduler: Any, callback: Any) -> None:
    functions = {"denoiser": denoiser} if callback is None else {"denoiser": denoiser, "callback_on_step_end": callback}
    for name, value in functions.items():
        if not callable(value):
            raise ConfigError(f"{name} has {got(value)}; expected a function or module")
    if isinstance(scheduler, type) or not all(callable(getattr(scheduler, n, None)) for n in ("times", "transition")):
        kind = f"the class {scheduler.__name__}" if isinstance(scheduler, type) else f"a {type(scheduler).__name__}"
        raise ConfigError(
            f"scheduler is {kind}; expected a genkit scheduler object, or DiffusersScheduler(…) around one of diffusers"
        )


def _check_prediction_type(denoiser: Denoiser, scheduler: Any) -> None:
    declared, expected = getattr(denoiser, "prediction_type", None), getattr(scheduler, "prediction_type", None)
    if declared is not None and expected is not None and declared != expected:
        raise ConfigError(
            f"the denoiser predicts {declared!r}, but the scheduler expects {expected!r}; construct the scheduler with "
            f"prediction_type={declared!r}"
        )


def _check_solver(solver: Solver, scheduler: Any, own_times: bool) -> None:
    one_step = (EulerSolver, AncestralSolver)
    if isinstance(solver, ChainSolver) and not isinstance(solver, one_step) and not hasattr(scheduler, "velocity"):
        raise ConfigError(
            f"{type(solver).__name__} needs a scheduler with known noise levels and one tensor as its state; with "
            f"{type(scheduler).__name__} use the solver 'euler' or 'ancestral'"
        )
    if own_times and hasattr(scheduler, "model_input"):
        raise ConfigError(
            "a diffusers scheduler walks its own timesteps from first to last: give num_inference_steps, not times or "
            "stop_at; or use FlowScheduler or VPScheduler"
        )


def _walk_times(scheduler: Any, n: int | None, times: Tensor | Sequence[float] | None, stop_at: int | None) -> Tensor:
    """The walk's times on the CPU, float64 with float32 values."""
    if times is None and n is None:
        raise ConfigError("the walk has no length: give num_inference_steps or times")
    n = None if n is None else checked_count("num_inference_steps", n)
    own: Tensor | Sequence[float] = scheduler.times(n) if times is None else times
    stateful = times is None and hasattr(scheduler, "model_input")  # a diffusers scheduler may repeat its last time
    grid = torch.as_tensor(own) if stateful else _checked_times(own, n)
    if stop_at is None:
        return grid
    expected = f"a step from 0 to {len(grid) - 2}"
    if checked_count("stop_at", stop_at, expected, 0) > len(grid) - 2:
        raise ConfigError(f"stop_at={stop_at}; expected {expected}")
    return torch.cat((grid[: stop_at + 1], grid.new_zeros(1)))


def _checked_times(times: Tensor | Sequence[float], n: int | None) -> Tensor:
    try:
        grid = torch.as_tensor(times, dtype=torch.float64).detach().cpu().to(torch.float32).to(torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"times={reprlib.repr(times)} are not numbers; expected a sequence of n + 1 times") from error
    if grid.ndim != 1 or len(grid) < 2:
        raise ConfigError(f"times has shape {tuple(grid.shape)}; expected (n + 1,) with n at least 1")
    if n is not None and n != len(grid) - 1:
        raise ConfigError(f"times describes {len(grid) - 1} steps, but num_inference_steps={n}; give one of the two")
    if not (bool((grid[1:] < grid[:-1]).all()) and 0.0 <= float(grid[-1]) and float(grid[0]) <= 1.0):
        shown = [round(float(v), 6) for v in grid[:8]]
        raise ConfigError(f"times must decrease strictly and lie in [0, 1]; got {shown}" + "…" * (len(grid) > 8))
    return grid


def _window(grad_steps: int | Sequence[int], n: int) -> frozenset[int]:
    """The indices of the steps that are differentiated."""
    if isinstance(grad_steps, (str, bool)) or not isinstance(grad_steps, (Integral, Iterable)):
        given = reprlib.repr(grad_steps)
        raise ConfigError(f"grad_steps={given}; expected how many of the last steps to differentiate, or step indices")
    if isinstance(grad_steps, Integral):
        if not 0 <= int(grad_steps) <= n:
            raise ConfigError(f"grad_steps={grad_steps}; expected 0 to {n}, the number of steps of the walk")
        return frozenset(range(n - int(grad_steps), n))
    steps: list[Any] = list(grad_steps)
    wrong = [
        step for step in steps if isinstance(step, bool) or not isinstance(step, Integral) or int(step) not in range(n)
    ]
    if wrong:
        raise ConfigError(f"grad_steps holds {wrong}; expected step indices from 0 to {n - 1}")
    return frozenset(int(step) for step in steps)


def _start(
    scheduler: Any,
    x: Any,
    shape: Sequence[int] | Mapping[str, Sequence[int]] | None,
    generator: torch.Generator | Sequence[torch.Generator] | Keys | None,
    context: Context | None,
    cond: Cond,
) -> tuple[Any, Keys]:
    """The first state and the walk's keys."""
    if (x is None) == (shape is None):
        got = "neither" if x is None else "both"
        raise ConfigError(f"give either x (a state to start from) or shape=(B, *) to draw one; got {got}")
    shapes = _map(x, _shape_of_tensor) if shape is None else _map(shape, _shape_with_batch)
    if len({sizes[0] for sizes in _values(shapes)}) != 1:
        raise ConfigError(f"the state's parts have the shapes {shapes}; expected one batch size, the first of each")
    batch = _first(shapes)[0]
    _check_tensors("cond", cond, batch)
    _check_tensors("context", context, batch)
    _check_context(scheduler, context)
    device = _device_of(x) if x is not None else next(iter((context or {}).values()), torch.empty(0)).device
    if isinstance(generator, Keys):
        if len(generator) != batch:
            raise ConfigError(f"generator holds {len(generator)} keys, but the batch has {batch} samples")
        keys = _keys_of_walk(generator)
    else:
        keys = draw_keys(generator, batch, device)
    if x is None:
        one = _map(shapes, lambda sizes: sizes[1:])
        x = scheduler.prior(keys.at(purpose="latents"), one, context)
    return x, keys


def _shape_with_batch(shape: Any) -> tuple[int, ...]:
    return checked_shape("shape", shape, "(B, *), a sequence of sizes with the batch first", least=1)


def _shape_of_tensor(x: Any) -> tuple[int, ...]:
    if not isinstance(x, Tensor) or x.ndim == 0:
        raise ConfigError(f"x has {got(x)}; expected a tensor (B, *) with the batch first, or a dict of them")
    return tuple(x.shape)


def _check_tensors(kind: str, values: Any, batch: int) -> None:
    if values is not None and not isinstance(values, Mapping):
        raise ConfigError(f"{kind} has {got(values)}; expected a mapping from names to tensors, or None")
    for name, value in (values or {}).items():
        if not isinstance(value, Tensor) or value.shape[:1] != (batch,):
            raise ConfigError(f"{kind}[{name!r}] has {got(value)}; expected a tensor with the batch size {batch} first")


def _check_context(scheduler: Any, context: Context | None) -> None:
    known = getattr(scheduler, "context_names", None)
    for name in context or {}:
        if known is not None and name not in known:
            raise ConfigError(
                f"{type(scheduler).__name__} reads no context {name!r}; it reads {', '.join(known) or 'none'}."
                f"{nearest(name, known)} What the network is told goes into cond"
            )
    scale = (context or {}).get("scale")
    if scale is not None and not bool(((scale >= 0) & torch.isfinite(scale)).all()):  # one wait for the device a walk
        raise ConfigError("context['scale'] holds negative or non-finite values; expected standard deviations")


def _keys_of_walk(keys: Keys) -> Keys:
    """One int64 key per sample from a training stream, so that a walk inside training is a walk like any other."""
    words = keys.at(purpose=f"{keys.purpose}/walk").words(2)
    key = (words[:, 0] >> 1 << 32) | words[:, 1]
    return Keys(key, torch.zeros_like(key), torch.zeros((), dtype=torch.int64, device=key.device))


def _log_prob(transition: Any, x: Any) -> Tensor:
    score = getattr(transition, "unchecked_log_prob", transition.log_prob)
    return score(x)


def _call_back(callback: Callback, step: int, grid: Tensor, x: Any, clean: Any) -> Any:
    changed = checked_changes(callback(step, float(grid[step]), {"sample": x, "x0": clean}), ("sample", "x0"))
    if "sample" not in changed:
        return x
    new, parts = changed["sample"], x if isinstance(x, Mapping) else {None: x}
    if isinstance(x, Mapping) and (not isinstance(new, Mapping) or set(new) != set(x)):
        raise ConfigError(f"the callback's sample has {got(new)}; expected a mapping with the fields {', '.join(x)}")
    for name, old in parts.items():
        value = new if name is None else new[name]
        check_same_shape("the callback's sample", value, "the state", old)
        if (value.dtype, value.device) != (old.dtype, old.device):
            expected = f"{old.dtype} on {old.device}"
            raise ConfigError(f"the callback's sample is {value.dtype} on {value.device}; expected {expected}")
    return new


def _progress(n: int, show: bool) -> Any:
    if not show:
        return range(n)
    from tqdm.auto import tqdm

    return tqdm(range(n), desc="sampling")


def _map(x: Any, change: Callable[[Any], Any]) -> Any:
    return {name: change(value) for name, value in x.items()} if isinstance(x, Mapping) else change(x)


def _first(x: Any) -> Any:
    return _values(x)[0]


def _values(x: Any) -> list[Any]:
    return list(x.values()) if isinstance(x, Mapping) else [x]


def _device_of(x: Any) -> torch.device:
    return _first(x).device


def _dtype_of(x: Any) -> torch.dtype:
    return _first(x).dtype


def _stack(states: list[Any]) -> Any:
    if isinstance(states[0], Mapping):
        return {name: torch.stack([state[name] for state in states]) for name in states[0]}
    return torch.stack(states)
