"""Several processes: the same training as one process, exact resume, and one decision for all."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from training import processes, toys
from training.test_resume import MESSY, everything, flip, numbers

from genkit.errors import CheckpointError, ConfigError, GenkitError
from genkit.serialization import load_json, load_tensors, save_json, save_tensors
from genkit.training import TensorData, Trainer
from genkit.training.checkpoint import checkpoints

pytestmark = pytest.mark.multiproc
DOUBLE = torch.float64


def rank() -> int:
    return int(os.environ["RANK"])


def trainer(folder: Path, objective=None, size: int = 11, **changes) -> Trainer:
    objective = toys.Regression(toys.make_net(dropout=0.3)) if objective is None else objective
    settings = toys.config(folder, num_processes=2, **(MESSY | changes))
    return Trainer(objective, settings, toys.make_data(size), toys.save_net)


def equal_on_all_ranks(values: dict[str, torch.Tensor]) -> bool:
    own = torch.cat([v.double().reshape(-1) for v in values.values()])
    low, high = own.clone(), own.clone()
    torch.distributed.all_reduce(low, torch.distributed.ReduceOp.MIN)
    torch.distributed.all_reduce(high, torch.distributed.ReduceOp.MAX)
    return torch.equal(low, high)


# --- exact resume -----------------------------------------------------------------------------------------------------


def _resume(folder: Path) -> None:
    whole = trainer(folder / "whole")
    assert whole.accelerator.num_processes == 2
    expected = numbers(whole.train())
    end = everything(whole)
    assert equal_on_all_ranks(end)
    run = trainer(folder / "cut")
    for entry in run.train():
        if entry.step == 7:
            break
    again = trainer(folder / "cut", resume_from_checkpoint="latest")
    assert numbers(again.train()) == expected[5:] and toys.same(everything(again), end)
    save_json(folder / f"seen{rank()}.json", [whole.objective.seen, again.objective.seen])
    # a damaged newest checkpoint: both ranks take the same older one
    if rank() == 0:
        flip(folder / "cut" / "checkpoint-12" / "trainer.json")
    torch.distributed.barrier()
    third = trainer(folder / "cut", resume_from_checkpoint="latest")
    assert [n[0] for n in numbers(third.train())] == [11, 12] and toys.same(everything(third), end)
    # one rank is told to stop: both do, at the same step
    steps = []
    for entry in trainer(folder / "stop").train():
        steps.append(entry.step)
        if entry.step == 3 and rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
    assert steps == [1, 2, 3, 4] and [s for s, _ in checkpoints(folder / "stop")] == [4]


def test_resume_is_bit_equal_and_decided_together(tmp_path):
    processes.run_ranks(_resume, tmp_path)
    (first, first_again), (second, second_again) = (load_json(tmp_path / f"seen{r}.json") for r in (0, 1))
    assert first_again == [m for m in first if m[0] >= 5] and second_again == [m for m in second if m[0] >= 5]
    for (step, ids), (other_step, other_ids) in zip(first, second, strict=True):
        assert step == other_step
        # no sample twice in a window, but for the stand-in of a rank that has none left
        assert not set(ids) & set(other_ids) or len(ids) == len(other_ids) == 1
    rows = (tmp_path / "cut" / "log.jsonl").read_text().splitlines()
    assert len(rows) == 12
    with pytest.raises(ConfigError, match="number of processes: 2 in the checkpoint, 1 now"):
        settings = toys.config(tmp_path / "stop", resume_from_checkpoint="latest", **MESSY)
        list(Trainer(toys.Regression(), settings, toys.make_data(11)).train())


# --- equal to one process ---------------------------------------------------------------------------------------------


def _cases(folder: Path):
    """(name, objective, data, settings of one process, settings of two): the same windows, cut differently."""
    lengths = torch.tensor([1.0, 9, 2, 5, 1, 1, 7, 3, 4], dtype=DOUBLE)
    tokens = TensorData(toys.make_data(9, DOUBLE).tensors | {"length": lengths})
    schedule = {"lr_scheduler": "linear", "warmup_steps": 4}
    double = lambda: toys.make_net(dtype=DOUBLE)  # noqa: E731
    yield (
        "plain",
        toys.Regression(double()),
        toys.make_data(9, DOUBLE),
        dict(batch_size=8, **schedule),
        dict(batch_size=4, **schedule),
    )
    yield (
        "accumulated",
        toys.Regression(double()),
        toys.make_data(9, DOUBLE),
        {"batch_size": 8},
        {"batch_size": 2, "gradient_accumulation_steps": 2},
    )
    yield (
        "tokens",
        toys.TokenRegression(double()),
        tokens,
        {"batch_size": 8},
        {"batch_size": 1, "gradient_accumulation_steps": 4},
    )
    yield (
        "turns",
        toys.TwoNetworks(),
        toys.make_data(13, DOUBLE),
        {"batch_size": 6},
        {"batch_size": 1, "gradient_accumulation_steps": 3},
    )
    yield (
        "skips",
        toys.Regression(double(), bad_steps=(2, 5)),
        toys.make_data(9, DOUBLE),
        {"batch_size": 4},
        {"batch_size": 2},
    )


class OneRankFails(toys.Regression):
    """The loss is NaN in one step of one rank only."""

    def loss(self, turn, batch, *, step, keys):
        output = super().loss(turn, batch, step=step, keys=keys)
        if step == 3 and rank() == 1:
            output.loss = output.loss * float("nan")
        return output


class SpareByRank(toys.Regression):
    """A parameter that the loss never uses, and that the objective allows."""

    def __init__(self) -> None:
        super().__init__()
        self.net_.register_parameter("spare", torch.nn.Parameter(torch.zeros(1)))

    def parameters_without_gradient(self, turn):
        return ("spare",)


def _compare(folder: Path) -> None:
    for name, objective, data, _, settings in _cases(folder):
        run = Trainer(objective, toys.config(folder / f"two-{name}", num_processes=2, **settings), data)
        logs = list(run.train())
        values = {f"{n}/{k}": v for n, m in objective.networks().items() for k, v in m.state_dict().items()}
        assert equal_on_all_ranks(values)
        if rank() == 0:
            save_tensors(folder / f"{name}.safetensors", values)
            save_json(folder / f"{name}.json", [[e.loss if not e.skipped else None, e.learning_rate] for e in logs])
    run = Trainer(OneRankFails(), toys.config(folder / "nan", max_steps=5), toys.make_data(12))
    assert [e.skipped for e in run.train()] == [False] * 3 + [True, False]
    assert equal_on_all_ranks(everything(run))
    run = Trainer(SpareByRank(), toys.config(folder / "spare", gradient_accumulation_steps=2), toys.make_data(12))
    assert len(list(run.train())) == 12
    if rank() == 0:
        shutil.rmtree(folder / "nan")
        (folder / "nan").write_text("in the way")
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match="cannot be written"):  # the main process found out, all know
        list(Trainer(toys.Regression(), toys.config(folder / "nan"), toys.make_data(12)).train())


def test_two_processes_equal_one_at_every_cut(tmp_path):
    processes.run_ranks(_compare, tmp_path)
    for name, objective, data, settings, _ in _cases(tmp_path):
        logs = list(Trainer(objective, toys.config(tmp_path / f"one-{name}", **settings), data).train())
        values = {f"{n}/{k}": v for n, m in objective.networks().items() for k, v in m.state_dict().items()}
        for key, value in load_tensors(tmp_path / f"{name}.safetensors").items():
            torch.testing.assert_close(value, values[key], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
        for entry, (loss, rate) in zip(logs, load_json(tmp_path / f"{name}.json"), strict=True):
            assert rate == entry.learning_rate
            assert entry.skipped if loss is None else loss == pytest.approx(entry.loss, rel=1e-9)


# --- FSDP2 ------------------------------------------------------------------------------------------------------------

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}


def _sharded(folder: Path) -> None:
    """Resume is bit-equal to the uninterrupted run, each rank holds half, the final pipeline is whole."""
    whole = trainer(folder / "whole", toys.Regression())
    expected = numbers(whole.train())
    network = whole.networks["net"]
    assert network.parameters["0.weight"].to_local().shape == (4, 3)
    run = trainer(folder / "cut", toys.Regression())
    for entry in run.train():
        if entry.step == 7:
            break
    again = trainer(folder / "cut", toys.Regression(), resume_from_checkpoint="latest")
    assert numbers(again.train()) == expected[5:]
    mine, theirs = everything(again), everything(whole)
    local = lambda t: t.to_local() if hasattr(t, "to_local") else t  # noqa: E731
    assert toys.same({k: local(v) for k, v in mine.items()}, {k: local(v) for k, v in theirs.items()})
    with pytest.raises(ConfigError, match="FSDP shards one network.*container module"):
        list(trainer(folder / "two", toys.TwoNetworks(torch.float32)).train())
    # one rank cannot write its shard: both fail, and no folder is left
    import genkit.training.checkpoint as module

    def full(path, tensors):
        raise OSError(28, "No space left on device")

    if rank() == 1:
        module.save_tensors = full
    with pytest.raises(GenkitError, match="No space left|other process"):
        list(trainer(folder / "full", toys.Regression()).train())
    torch.distributed.barrier()
    assert not [p for p in (folder / "full").iterdir() if "checkpoint" in p.name]


def test_fsdp2_shards_one_network_and_resumes_bit_equal(tmp_path):
    processes.run_ranks(_sharded, tmp_path, env=FSDP)
    files = sorted(p.name for p in (tmp_path / "whole" / "checkpoint-12" / "networks").iterdir())
    assert files == ["net.rank0-of-2.safetensors", "net.rank1-of-2.safetensors"]
    # the same training without sharding, in one process with the same windows
    settings = toys.config(tmp_path / "one", **(MESSY | {"batch_size": 4}))
    one = Trainer(toys.Regression(), settings, toys.make_data(11), toys.save_net)
    list(one.train())
    sharded = load_tensors(tmp_path / "whole" / "pipeline" / "net.safetensors")
    for key, value in load_tensors(tmp_path / "one" / "pipeline" / "net.safetensors").items():
        torch.testing.assert_close(sharded[key], value, rtol=1e-4, atol=1e-5)
