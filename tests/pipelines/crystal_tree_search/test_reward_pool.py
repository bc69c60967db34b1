"""Rewards over processes: the same bits as in one, and faults that cost only their own rows."""

from __future__ import annotations

import multiprocessing
import os
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from genkit.errors import ConfigError
from genkit.metrics.pareto import ParetoArchive
from genkit.pipelines.crystal_tree_search import reward_pool
from genkit.pipelines.crystal_tree_search.reward_pool import GuardedReward, RewardPool
from genkit.rewards import FunctionReward, Reward, RewardOutput, StackedRewards, reward_output


class Faulty(Reward):
    """The sample itself, but 1 raises, 2 hangs and 3 ends the process; sums of a chunk are in the logs."""

    def values(self, sample: Any, context: Any) -> RewardOutput:
        if (sample == 1).any():
            raise ValueError("a one")
        if (sample == 2).any():
            time.sleep(600)
        if (sample == 3).any():
            os._exit(7)
        logs = {"count": int((sample > 5).sum()), "mean": sample.mean()}
        scale = 1.0 if context is None else context["scale"]
        return reward_output(scale * sample, sample != 4, logs)


class Matrix(Reward):
    """Values that depend on the batch in their last bits, as a network's do."""

    def values(self, sample: Any, context: Any) -> Tensor:
        weights = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
        return torch.tanh(sample["x"] @ weights).cumsum(0).mean(1)


class Column(Reward):
    """Falls where the sample rises, with last bits that depend on the chunk."""

    def values(self, sample: Any, context: Any) -> Tensor:
        return torch.sin(sample) - sample + 1e-6 * sample.mean()


def two_columns(sample: Any, context: Any) -> Tensor:
    return torch.stack((sample, -sample), 1)


def test_in_this_process_one_that_raises_costs_its_own_row() -> None:
    guarded = GuardedReward(Faulty(), chunk=4)
    output = guarded(torch.tensor([0.0, 6, 1, 7, 8, 4, 9]))
    assert output.valid.tolist() == [True, True, False, True, True, False, True]
    assert output.values[output.valid].tolist() == [0, 6, 7, 8, 9]
    assert [(one.kind, one.rows, one.message) for one in guarded.failures] == [("raised", (2,), "ValueError: a one")]
    assert output.logs["reward/raised"] == 1 and output.logs["count"] == 4


def test_counts_are_added_and_means_are_weighted() -> None:
    sample = torch.arange(5.0, 15.0)
    output = GuardedReward(Faulty(), chunk=4)(sample)
    assert output.logs["count"] == 9 and output.logs["mean"] == pytest.approx(float(sample.mean()))


def test_every_row_failing_still_gives_the_right_shape() -> None:
    def raising(sample: Any, context: Any) -> Tensor:
        raise RuntimeError("always")

    bad = FunctionReward(raising)
    output = GuardedReward(bad)(torch.zeros(3))
    assert output.values.shape == (3,) and not output.valid.any()
    stacked = GuardedReward(StackedRewards({"a": bad, "b": bad}))(torch.zeros(3))
    assert stacked.values.shape == (3, 2) and not stacked.valid.any()
    both = GuardedReward(FunctionReward(two_columns))(torch.arange(3.0))
    assert both.values.tolist() == [[0, 0], [1, -1], [2, -2]]


def test_a_misuse_is_raised_and_not_taken_for_a_bad_crystal() -> None:
    from genkit.pipelines.crystal_tree_search.rewards import DensityReward

    with pytest.raises(ConfigError, match="expected a dict of the tensors"):
        GuardedReward(DensityReward())(torch.zeros(3))


class Instant:
    """Stands for a process: it answers at once, never for a 2, and hangs up at a 3."""

    started = 0.0
    ended: ClassVar[list[str]] = []

    def __init__(self, reward: Reward, threads: int) -> None:
        self.connection, self.theirs = multiprocessing.Pipe()
        self.process = SimpleNamespace(join=lambda seconds: None, exitcode=7)
        self.reward, self.job = reward, None

    def wait_ready(self) -> None:
        pass

    def give(self, job: Any, sample: Any, context: Any) -> None:
        self.job, self.started = job, time.monotonic()
        if (sample == 3).any():
            self.theirs.close()
        elif not (sample == 2).any():
            self.theirs.send(reward_pool._judge(self.reward, sample, context))

    def stop(self) -> None:
        self.ended.append("stopped")
        self.connection.close()


def test_hangs_and_deaths_cost_their_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_pool, "_Worker", Instant)
    sample = torch.tensor([0.0, 6, 2, 7, 8, 3, 9, 10, 11, 1, 12])
    with RewardPool(Faulty(), 2, chunk=4, timeout=0.3) as pool:
        output = pool(sample)
        # each fault twice: the chunk, then its row alone; the two that stay are ended by close
        assert len(Instant.ended) == 4
    bad = {2: "timeout", 5: "died", 9: "raised"}
    assert {one.rows[0]: one.kind for one in pool.failures} == bad and len(Instant.ended) == 6
    assert output.valid.tolist() == [row not in bad for row in range(11)]
    assert torch.equal(output.values[output.valid], sample[output.valid])
    assert [output.logs[f"reward/{kind}"] for kind in ("timeout", "died", "raised")] == [1, 1, 1]
    assert next(one for one in pool.failures if one.kind == "timeout").seconds >= 0.3
    assert "exit code 7" in next(one.message for one in pool.failures if one.kind == "died")


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_hang_is_ended_and_the_rest_is_judged() -> None:
    start = time.monotonic()
    with GuardedReward(Faulty(), timeout=5.0, chunk=1) as guarded:
        output = guarded(torch.tensor([6.0, 2.0, 7.0]))
    assert output.valid.tolist() == [True, False, True] and output.logs["reward/timeout"] == 1
    assert [(one.kind, one.rows) for one in guarded.failures] == [("timeout", (1,))]
    assert 5.0 <= guarded.failures[0].seconds < time.monotonic() - start < 600  # which it sleeps


@pytest.mark.multiproc
@pytest.mark.slow
def test_hangs_deaths_and_errors_are_recorded_and_the_rest_is_judged() -> None:
    sample = torch.tensor([0.0, 6, 2, 7, 8, 3, 9, 10, 11, 1, 12, 13, 14, 15])
    pool = RewardPool(Faulty(), 2, chunk=4, timeout=8.0)  # a machine may be busy
    output = pool(sample, {"scale": torch.arange(14.0)})
    bad = {2: "timeout", 5: "died", 9: "raised"}
    assert {one.rows[0]: one.kind for one in pool.failures} == bad
    assert output.valid.tolist() == [row not in bad for row in range(14)]
    good = output.valid
    assert torch.equal(output.values[good], (sample * torch.arange(14.0))[good])
    assert "exit code 7" in next(one.message for one in pool.failures if one.kind == "died")
    again = pool(torch.tensor([5.0, 6.0]))  # a pool is as good as new after all this
    assert again.values.tolist() == [5, 6] and again.valid.all()
    pool.close()


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_chunk_of_hangs_is_given_up() -> None:
    with RewardPool(Faulty(), 1, chunk=16, timeout=3.0) as patient:
        output = patient(torch.tensor([6.0, *[2.0] * 8, 7.0]))
    kinds = [one.kind for one in patient.failures]
    assert kinds.count("timeout") == 3 and kinds.count("skipped") == 6
    assert output.valid.tolist() == [True] + [False] * 9


@pytest.mark.multiproc
@pytest.mark.slow
def test_processes_change_no_bit() -> None:
    sample = {"x": torch.randn(50, 64, generator=torch.Generator().manual_seed(0))}
    here = RewardPool(Matrix(), 0, chunk=8)(sample).values
    with RewardPool(Matrix(), 2, chunk=8) as spread:
        assert torch.equal(spread(sample).values, here)
    assert not torch.equal(RewardPool(Matrix(), 0, chunk=16)(sample).values, here)  # the chunk does


@pytest.mark.multiproc
@pytest.mark.slow
def test_chgnet_over_processes_gives_the_serial_bits() -> None:
    from pymatgen.core import Lattice, Structure

    from genkit.pipelines.crystal_tree_search.hull import Hull
    from genkit.pipelines.crystal_tree_search.potentials import CHGNetPotential
    from genkit.pipelines.crystal_tree_search.rewards import StabilityReward
    from genkit.pipelines.crystal_tree_search.structures import from_structures

    random, cells = np.random.default_rng(0), []
    for _ in range(20):
        cell = (np.ones((3, 3)) - np.eye(3)) * 2.845 + random.normal(size=(3, 3)) * 0.1
        cells.append(Structure(Lattice(cell), ["Na", "Cl"], random.normal(size=(2, 3)) * 0.02 + [[0] * 3, [0.5] * 3]))
    batch = from_structures(cells)
    hull = Hull.from_arrays([[11, 0], [17, 0], [11, 17]], [-1.3, -1.8, -3.7])
    reward = StabilityReward(CHGNetPotential(chunk=4), hull)
    serial = reward(batch)
    with RewardPool(reward, 2, chunk=8) as spread:
        found = spread(batch)
    assert serial.valid.all()
    assert torch.equal(found.values, serial.values)


def archive_of(processes: int, sample: Tensor) -> dict[str, bytes]:
    """The columns of the archive that a search would fill, batch by batch, from a reward over processes."""
    reward, archive = StackedRewards({"column": Column(), "faulty": Faulty()}), ParetoArchive(2)
    with RewardPool(reward, processes, chunk=4) as pool:
        for start in range(0, len(sample), 9):
            output = pool(sample[start : start + 9])
            rows = torch.nonzero(output.valid).squeeze(1)
            archive.add(output.values[rows], ids=start + rows)
    assert len(archive.front) > 1
    columns = {**archive.state_dict(), "front": archive.front}
    return {name: column.numpy().tobytes() for name, column in columns.items()}


@pytest.mark.multiproc
@pytest.mark.slow
def test_one_and_two_processes_fill_the_same_archive_byte_for_byte() -> None:
    sample = torch.rand(30, generator=torch.Generator().manual_seed(0)) + 6
    sample[[4, 17]] = torch.tensor([1.0, 4.0])  # one raises, one is invalid
    found = [archive_of(processes, sample) for processes in (0, 1, 2)]
    assert found[0] == found[1] == found[2] and len(found[0]) > 0
    assert archive_of(0, sample.flip(0)) != found[0]  # the control: other samples, other bytes


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be sent to another process"):
        RewardPool(FunctionReward(lambda sample, context: sample), 1)(torch.zeros(2))


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="process of its own"):
        RewardPool(Faulty(), 0, timeout=1.0)
    with pytest.raises(ConfigError, match="FunctionReward wraps"):
        RewardPool(two_columns)  # type: ignore[arg-type]
    for wrong in ({"processes": -1}, {"chunk": 0}, {"threads": 0}, {"timeout": 0.0}):
        with pytest.raises(ConfigError, match="expected"):
            RewardPool(Faulty(), **wrong)
    empty = RewardPool(Faulty(), 0)(torch.zeros(0))
    assert empty.values.shape == (0,)
