"""Any reward, spread over processes, and guarded: one that raises or hangs costs its own rows, and the search goes on.

A batch is cut into fixed chunks (rows 0 to 63, 64 to 127, …), which are judged in this process or in others; the
values are the same bit for bit, because the chunks are. A chunk that raises, hangs or kills its process is judged
again row by row, so that only the rows at fault get no value; each fault is a typed record
(:class:`RewardFailure`).

A search spreads its rewards with ``pipe(..., reward_processes=2)``. Values come back in the order of the rows, whatever
process was first, so the archive of the search is the same, byte for byte, with none, one or two processes.

Processes are spawned: a script that uses them needs ``if __name__ == "__main__":``, and a reward must be something
that another process can import (a class or function of a module, not a lambda).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from genkit._checks import checked_count, checked_number
from genkit.errors import ConfigError, GenkitError
from genkit.rewards.base import Context, Reward, RewardOutput, Sample, batch_size, reward_output

__all__ = ["GuardedReward", "RewardFailure", "RewardPool"]

#: Seconds that a process may take to import everything and say that it is ready.
_START = 180.0
#: Time-outs of one chunk after which the rest of it is not tried any more.
_PATIENCE = 3


@dataclass(frozen=True)
class RewardFailure:
    """Rows that a reward could not judge.

    Args:
        kind: ``raised``, ``timeout`` (it hung, and its process was ended), ``died`` (its process ended by itself) or
            ``skipped`` (not tried, after several time-outs of the same chunk).
        rows: of the batch.
        message: what was raised or seen.
        seconds: that it took.
    """

    kind: Literal["raised", "timeout", "died", "skipped"]
    rows: tuple[int, ...]
    message: str
    seconds: float


@dataclass(frozen=True)
class _Job:
    chunk: int
    rows: tuple[int, ...]


@dataclass
class _Gathered:
    """Values of the rows that are done, and the counts that came with them."""

    size: int
    values: dict[int, np.ndarray] = field(default_factory=dict)
    logs: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    failures: list[RewardFailure] = field(default_factory=list)
    strikes: dict[int, int] = field(default_factory=dict)

    def add(self, job: _Job, values: np.ndarray, valid: np.ndarray, logs: Mapping[str, Any]) -> None:
        for row, value, good in zip(job.rows, values, valid, strict=True):
            self.values[row] = np.where(good, value, np.nan)
        self.logs.append((len(job.rows), logs))

    def output(self, columns: int | None) -> RewardOutput:
        kinds = [value.dtype for value in self.values.values()]
        shape = next((value.shape for value in self.values.values()), () if columns is None else (columns,))
        table = np.full((self.size, *shape), np.nan, dtype=np.result_type(*kinds) if kinds else np.float64)
        for row, value in self.values.items():
            table[row] = value
        counts: dict[str, Tensor | float] = {**_merged(self.logs)}
        for failure in self.failures:
            key = f"reward/{failure.kind}"
            counts[key] = int(counts.get(key, 0)) + len(failure.rows)
        return reward_output(torch.from_numpy(table), logs=counts)


def _merged(parts: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Tensor | float]:
    """Counts (integers) are added; anything else is averaged over the rows that it was said of."""
    found: dict[str, Tensor | float] = {}
    for key in sorted({key for _, logs in parts for key in logs}):
        entries = [(rows, logs[key]) for rows, logs in parts if key in logs]
        if all(isinstance(value, int) for _, value in entries):
            found[key] = sum(value for _, value in entries)
        else:
            known = [(rows, float(value)) for rows, value in entries if float(value) == float(value)]
            total = sum(rows for rows, _ in known)
            found[key] = sum(rows * value for rows, value in known) / total if total else float("nan")
    return found


# --- the other side ---------------------------------------------------------------------------------------------------


def _arrays(parts: Any) -> Any:
    """Tensors as arrays: sent as bytes, without the file descriptors that shared tensors use up."""
    if isinstance(parts, Tensor):
        return parts.detach().cpu().numpy()
    if isinstance(parts, Mapping):
        return {key: _arrays(value) for key, value in parts.items()}
    return parts


def _tensors(parts: Any) -> Any:
    if isinstance(parts, np.ndarray):
        return torch.from_numpy(parts)
    if isinstance(parts, Mapping):
        return {key: _tensors(value) for key, value in parts.items()}
    return parts


def _judge(reward: Reward, sample: Any, context: Any) -> tuple[Any, ...]:
    """The answer to one job; it never raises."""
    try:
        output = reward(_tensors(sample), _tensors(context))
        logs = {key: value if isinstance(value, int) else float(value) for key, value in output.logs.items()}
        return "done", output.values.detach().cpu().numpy(), output.valid.cpu().numpy(), logs
    except GenkitError as error:  # a misuse, which no row is at fault for
        return "misused", str(error)
    except Exception as error:  # any callable may stand behind a reward
        return "raised", f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    """Sums are split by threads, so their last bits depend on the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _prepare(reward: Any) -> None:
    """Lets a reward, or the parts of one, load networks before the clock of the first chunk runs."""
    prepare = getattr(reward, "prepare", None)
    if callable(prepare):
        prepare()
    parts = getattr(reward, "rewards", None)
    for part in parts.values() if isinstance(parts, Mapping) else ():
        _prepare(part)


def _serve(connection: Connection, reward: Reward, threads: int) -> None:
    """The main function of a worker."""
    torch.set_num_threads(threads)
    _prepare(reward)
    connection.send("ready")
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while (job := connection.recv()) is not None:
            connection.send(_judge(reward, *job))


class _Worker:
    """A spawned process with one reward."""

    def __init__(self, reward: Reward, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, reward, threads), daemon=True)
        try:
            self.process.start()
        except Exception as error:  # pickling errors have no class in common
            raise ConfigError(
                f"{reward} cannot be sent to another process ({type(error).__name__}: {error}); define it in a module, "
                "without lambdas, or use processes=0"
            ) from error
        finally:
            theirs.close()
        self.job: _Job | None = None
        self.started = 0.0

    def wait_ready(self) -> None:
        try:
            if self.connection.poll(_START) and self.connection.recv() == "ready":
                return
        except EOFError:
            pass
        self.stop()
        raise ConfigError(
            "a reward process ended before it was ready; a script that uses processes needs "
            '`if __name__ == "__main__":` around what it does, and its reward must be importable'
        )

    def give(self, job: _Job, sample: Any, context: Any) -> None:
        self.job, self.started = job, time.monotonic()
        self.connection.send((sample, context))

    def stop(self) -> None:
        self.connection.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


# --- this side --------------------------------------------------------------------------------------------------------


class RewardPool(Reward):
    """A reward over processes, or in this one, by fixed chunks.

    Args:
        reward: what judges.
        processes: how many; 0: this process (no time-out then).
        chunk: rows judged together.
        timeout: seconds that a chunk may take before its process is ended; None: any time. What a reward loads in a
            method ``prepare()`` is loaded before.
        threads: of torch, while it judges; the values depend on it in their last bits.

    ``failures`` holds the records of all calls. Use it as a context manager, or call :meth:`close`; processes end with
    this one anyway.

    Raises:
        ConfigError: a count that is not positive, a time-out without a process; on use, a reward that cannot be sent to
            a process, and any error of genkit's own that the reward raises, since these are misuses, not bad crystals.
    """

    def __init__(
        self, reward: Reward, processes: int = 2, *, chunk: int = 64, timeout: float | None = None, threads: int = 1
    ) -> None:
        if not isinstance(reward, Reward):
            raise ConfigError(f"reward={type(reward).__name__}; expected a Reward; FunctionReward wraps a function")
        self.reward = reward
        self.processes = checked_count("processes", processes, "how many processes, 0 for this one", 0)
        self.chunk, self.threads = checked_count("chunk", chunk), checked_count("threads", threads)
        if timeout is not None:
            timeout = checked_number("timeout", timeout, "a positive number of seconds", lambda value: value > 0)
            if not self.processes:
                raise ConfigError(
                    f"timeout={timeout} with processes=0; a time-out needs a process of its own: processes=1"
                )
        self.timeout = timeout
        self.failures: list[RewardFailure] = []
        self._workers: list[_Worker] = []

    def __getstate__(self) -> dict[str, Any]:
        """Without the processes, which the other side makes itself."""
        return {**self.__dict__, "_workers": []}

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes; the next call starts new ones."""
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def values(self, sample: Sample, context: Context | None) -> RewardOutput:
        """Values of the rows in order; see :class:`RewardPool`."""
        size = batch_size(sample)
        jobs = deque(
            _Job(number, tuple(range(start, min(start + self.chunk, size))))
            for number, start in enumerate(range(0, size, self.chunk))
        )
        gathered = _Gathered(size)
        try:
            if self.processes:
                self._spread(jobs, _arrays(sample), _arrays(context), gathered)
            else:
                self._here(jobs, _arrays(sample), _arrays(context), gathered)
        except BaseException:
            self.close()  # a busy process would give its stale answer to the next call
            raise
        self.failures += gathered.failures
        names = getattr(self.reward, "names", None)
        output = gathered.output(None if names is None else len(names))
        device = (sample if isinstance(sample, Tensor) else next(iter(sample.values()))).device
        return RewardOutput(output.values.to(device), output.valid.to(device), output.logs)

    def _here(self, jobs: deque[_Job], sample: Any, context: Any, gathered: _Gathered) -> None:
        with _threads(self.threads):
            while jobs:
                job, start = jobs.popleft(), time.monotonic()
                answer = _judge(self.reward, _rows(sample, job.rows), _rows(context, job.rows))
                self._settle(job, answer, time.monotonic() - start, jobs, gathered)

    def _spread(self, jobs: deque[_Job], sample: Any, context: Any, gathered: _Gathered) -> None:
        self._start(min(self.processes, max(len(jobs), 1)))
        while jobs or any(worker.job for worker in self._workers):
            for worker in [w for w in self._workers if w.job is None]:
                job = self._next(jobs, gathered)
                if job is None:
                    break
                worker.give(job, _rows(sample, job.rows), _rows(context, job.rows))
            busy = [worker for worker in self._workers if worker.job is not None]
            if not busy:
                continue
            wait([worker.connection for worker in busy], self._patience(busy))
            for worker in busy:
                self._collect(worker, jobs, gathered)

    def _start(self, number: int) -> None:
        fresh = [_Worker(self.reward, self.threads) for _ in range(number - len(self._workers))]
        self._workers += fresh
        for worker in fresh:  # they start side by side
            worker.wait_ready()

    def _next(self, jobs: deque[_Job], gathered: _Gathered) -> _Job | None:
        while jobs:
            job = jobs.popleft()
            if gathered.strikes.get(job.chunk, 0) <= _PATIENCE:
                return job
            gathered.failures.append(RewardFailure("skipped", job.rows, "its chunk timed out several times", 0.0))
        return None

    def _patience(self, busy: Sequence[_Worker]) -> float | None:
        if self.timeout is None:
            return None
        return max(0.0, min(worker.started for worker in busy) + self.timeout - time.monotonic())

    def _collect(self, worker: _Worker, jobs: deque[_Job], gathered: _Gathered) -> None:
        """What a busy worker has to say: an answer, nothing yet, too long nothing, or that it is gone."""
        job, seconds = worker.job, time.monotonic() - worker.started
        ready = worker.connection.poll()  # now: it may have answered while another one was being started again
        if job is None or (not ready and (self.timeout is None or seconds < self.timeout)):
            return
        worker.job = None
        answer: tuple[Any, ...] = ("timeout", f"no answer within {self.timeout} s")
        if ready:
            try:
                answer = worker.connection.recv()
            except (EOFError, OSError):
                worker.process.join(1.0)
                answer = ("died", f"the process ended with exit code {worker.process.exitcode}")
        if answer[0] in ("timeout", "died"):
            worker.stop()
            self._workers.remove(worker)
            self._start(len(self._workers) + 1)
        self._settle(job, answer, seconds, jobs, gathered)

    @staticmethod
    def _settle(job: _Job, answer: tuple[Any, ...], seconds: float, jobs: deque[_Job], gathered: _Gathered) -> None:
        kind, *rest = answer
        if kind == "done":
            gathered.add(job, *rest)
            return
        if kind == "misused":
            raise ConfigError(rest[0])
        if kind != "raised":
            gathered.strikes[job.chunk] = gathered.strikes.get(job.chunk, 0) + 1
        if len(job.rows) > 1:
            jobs.extendleft(_Job(job.chunk, (row,)) for row in reversed(job.rows))
        else:
            gathered.failures.append(RewardFailure(kind, job.rows, rest[0], seconds))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reward!r}, processes={self.processes})"


class GuardedReward(RewardPool):
    """A reward that may raise or hang: without a time-out in this process, with one in a process of its own.

    Args:
        reward: what judges.
        timeout: seconds that a chunk may take; None: any time.
        chunk: rows judged together.
        threads: of torch, while it judges.
    """

    def __init__(self, reward: Reward, timeout: float | None = None, *, chunk: int = 64, threads: int = 1) -> None:
        super().__init__(reward, 0 if timeout is None else 1, chunk=chunk, timeout=timeout, threads=threads)


def _rows(parts: Any, rows: tuple[int, ...]) -> Any:
    """The rows of arrays, of lists, and of the entries of mappings."""
    if isinstance(parts, Mapping):
        return {key: _rows(value, rows) for key, value in parts.items()}
    if isinstance(parts, np.ndarray) and parts.ndim:
        return parts[rows[0] : rows[-1] + 1]
    if isinstance(parts, list | tuple):
        return parts[rows[0] : rows[-1] + 1]
    return parts
