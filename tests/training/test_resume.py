"""Stop anywhere, damage anything: a resumed run equals the uninterrupted one or says exactly why it cannot be."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from training import processes, toys

from genkit.errors import CheckpointError, ConfigError
from genkit.serialization import load_json, load_tensors, verify_folder
from genkit.training import DivergenceError, TensorData, Trainer
from genkit.training.batches import BatchReader
from genkit.training.checkpoint import (
    changed_setup,
    checkpoints,
    choose_checkpoint,
    latest_checkpoint,
    prune_checkpoints,
)
from genkit.training.lock import hold_output_dir

MESSY = {
    "gradient_accumulation_steps": 2,
    "ema_decay": 0.9,
    "ema_start_step": 2,
    "lr_scheduler": "cosine",
    "warmup_steps": 3,
    "save_steps": 5,
}


def trainer(folder: Path, objective=None, size: int = 11, **changes) -> Trainer:
    """Dropout, noise, averages and a schedule; 3 steps an epoch, the last one ragged."""
    objective = toys.Regression(toys.make_net(dropout=0.3)) if objective is None else objective
    return Trainer(objective, toys.config(folder, **(MESSY | changes)), toys.make_data(size), toys.save_net)


def everything(run: Trainer) -> dict[str, torch.Tensor]:
    """All tensors a run ends with."""
    found = {}
    for name, network in run.networks.items():
        found |= {f"{name}/{k}": v for k, v in network.saved_tensors().items()}
        found |= {f"{name}/ema/{k}": v for k, v in (network.ema.shadow if network.ema else {}).items()}
        for i, state in network.optimizer.state_dict()["state"].items():
            found |= {f"{name}/adam/{i}/{k}": v for k, v in state.items()}
    return {k: v.detach().clone() for k, v in found.items()}


def numbers(entries) -> list[tuple]:
    return [(e.step, e.phase, e.turn, e.loss, e.learning_rate, e.grad_norm, e.logs) for e in entries]


class RunningMean(torch.nn.Module):
    """Subtracts the running mean of what it has seen in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = torch.lerp(self.mean, x.detach().mean(dim=0), 0.1)
        return x - self.mean


def _partly_trained() -> toys.Regression:
    """A frozen base and a trained head behind a layer with running statistics, as an adapter would be."""
    net = toys.make_net(dropout=0.3)
    net[0].requires_grad_(False)
    net.insert(1, RunningMean())
    return toys.Regression(net)


# --- exact resume -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: toys.Regression(toys.make_net(dropout=0.3)),
        lambda: toys.TwoNetworks(torch.float32),
        lambda: _partly_trained(),
        lambda: toys.TwoPhases((5, 9)),  # the checkpoint of step 5 ends a phase
        lambda: toys.TwoPhases((3, 9)),  # … and here it is inside the second
    ],
    ids=["dropout", "turns", "partly", "phase-end", "in-phase"],
)
def test_a_resumed_run_is_bit_equal_in_the_middle_of_an_epoch(tmp_path, make):
    whole = trainer(tmp_path / "whole", make())
    expected = numbers(whole.train())
    first = trainer(tmp_path / "cut", make())
    for entry in first.train():
        if entry.step == 7:  # two steps after the checkpoint: they are lost and repeated
            break
    torch.manual_seed(99)  # the process-wide state must not matter
    second = trainer(tmp_path / "cut", make(), resume_from_checkpoint="latest")
    assert numbers(second.train()) == expected[5:]
    assert toys.same(everything(second), everything(whole))
    rows = [json.loads(line) for line in (tmp_path / "cut" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))  # steps 6 and 7 are there once
    assert [row["loss"] for row in rows] == [e[3] for e in expected]
    assert second.turn_counts == whole.turn_counts


def test_a_named_checkpoint_is_resumed_into_another_folder(tmp_path):
    whole = trainer(tmp_path / "whole")
    list(whole.train())
    again = trainer(tmp_path / "again", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert [e.step for e in again.train()] == list(range(6, 13))
    assert toys.same(everything(again), everything(whole))


def test_skipped_steps_and_their_count_are_resumed(tmp_path):
    make = lambda: toys.Regression(bad_steps=(3, 4, 5, 9))  # noqa: E731
    whole = trainer(tmp_path / "whole", make())
    list(whole.train())
    for entry in trainer(tmp_path / "cut", make()).train():
        if entry.step == 5:
            break
    again = trainer(tmp_path / "cut", make(), resume_from_checkpoint="latest")
    list(again.train())
    assert again.skipped == whole.skipped == 4 and toys.same(everything(again), everything(whole))
    for entry in trainer(tmp_path / "strict", make(), max_skipped_steps=2).train():
        if entry.step == 5:
            break
    with pytest.raises(DivergenceError):  # the third in a row, two of them before the checkpoint
        list(trainer(tmp_path / "strict", make(), max_skipped_steps=2, resume_from_checkpoint="latest").train())


def test_latest_without_a_checkpoint_starts_fresh_and_a_finished_run_says_so(tmp_path, caplog):
    caplog.set_level(logging.INFO, "genkit.training")
    list(trainer(tmp_path, resume_from_checkpoint="latest").train())
    assert "no checkpoint, starting fresh" in caplog.text
    before = (tmp_path / "log.jsonl").read_text()
    shutil.rmtree(tmp_path / "pipeline")  # as if it had been killed before its last act
    assert list(trainer(tmp_path, resume_from_checkpoint="latest").train()) == []
    assert "max_steps=12 is already reached" in caplog.text
    assert (tmp_path / "log.jsonl").read_text() == before and (tmp_path / "pipeline" / "net.safetensors").exists()
    assert [
        e.step for e in trainer(tmp_path, resume_from_checkpoint="latest", max_steps=14, lr_scheduler="cosine").train()
    ] == [13, 14]


def test_a_folder_in_use_is_not_run_over(tmp_path):
    list(trainer(tmp_path).train())
    with pytest.raises(ConfigError, match="already holds a run.*checkpoint-12.*resume_from_checkpoint=latest"):
        list(trainer(tmp_path).train())


def test_two_runs_at_once_in_one_folder_are_refused(tmp_path):
    first = trainer(tmp_path, save_steps=1).train()
    next(first)
    (stage := tmp_path / ".tmp-checkpoint-2-0123456789ab").mkdir()  # what the first is just writing
    for resume in (None, "latest"):
        with pytest.raises(ConfigError, match=f"output_dir {tmp_path} is in use by another run.*another output_dir"):
            list(trainer(tmp_path, resume_from_checkpoint=resume).train())
    assert stage.exists() and next(first).step == 2
    first.close()
    assert [e.step for e in trainer(tmp_path, resume_from_checkpoint="latest").train()][0] == 3


def _hold(folder: Path, told: Path) -> None:
    with hold_output_dir(folder):
        told.touch()
        time.sleep(60)


def test_a_killed_run_lets_go_of_its_folder(tmp_path):
    child = processes.start(_hold, tmp_path, tmp_path / "told", quiet=True)
    while not (tmp_path / "told").exists():
        time.sleep(0.005)
    with pytest.raises(ConfigError, match="in use"), hold_output_dir(tmp_path):
        pass
    child.kill()
    child.join()
    with hold_output_dir(tmp_path):
        pass


def test_changed_data_are_refused(tmp_path):
    objective, settings = toys.Regression(), toys.config(tmp_path, max_steps=5)
    list(Trainer(objective, settings, toys.make_data(11)).train())
    for name in ("x", "y"):
        data = toys.make_data(11)
        data.tensors[name][10, 0] += 1e-6
        again = settings.model_copy(update={"resume_from_checkpoint": "latest"})
        with pytest.raises(ConfigError, match="values of the training data .*: [0-9a-f]{64} in the checkpoint"):
            list(Trainer(objective, again, data).train())
    renamed = TensorData({"x": data.tensors["x"], "z": toys.make_data(11).tensors["y"]})
    with pytest.raises(ConfigError, match="values of the training data"):
        list(Trainer(objective, again, renamed).train())
    assert list(Trainer(objective, again, toys.make_data(11)).train()) == []


def test_a_fingerprint_is_cheap_repeatable_and_absent_for_augmented_data():
    class Augmented(TensorData):
        reads = 0

        def __getitem__(self, index):
            Augmented.reads += 1
            return {"x": self.tensors["x"][index] + torch.rand(())}

    torch.manual_seed(3)
    before = torch.get_rng_state()
    data = Augmented({"x": torch.zeros(1000, 2)})
    reader = BatchReader(data)
    torch.set_rng_state(before)
    Augmented.reads = 0
    assert reader.fingerprint() is None and Augmented.reads == 128
    assert torch.equal(torch.get_rng_state(), before)
    x = torch.arange(1000, dtype=torch.bfloat16)
    first, last = x.clone(), x.clone()
    first[0], last[-1] = 7.0, 7.0
    found = [BatchReader(TensorData({"x": v})).fingerprint() for v in (x, x.clone(), first, last, x.short())]
    assert found[0] == found[1] and len(set(found)) == 4
    assert changed_setup({"samples": 3, "data": None}, {"data": "1", "samples": 3, "world_size": 1, "sharded": 0}) == []


def test_going_back_does_not_mix_with_newer_checkpoints(tmp_path):
    list(trainer(tmp_path).train())
    with pytest.raises(ConfigError, match="holds checkpoint-12, checkpoint-10, newer than the checkpoint to resume"):
        list(trainer(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-5")).train())
    for _, folder in checkpoints(tmp_path):
        shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="finished pipeline and no checkpoint"):
        list(trainer(tmp_path, resume_from_checkpoint="latest").train())


def test_changed_settings_are_refused_with_both_values(tmp_path):
    list(trainer(tmp_path, max_steps=5).train())
    for changes, message in [
        (
            {"learning_rate": 3e-2, "seed": 1},
            "learning_rate: 0.01 in the checkpoint, 0.03 now\n  seed: 0 in the checkpoint, 1 now",
        ),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps: 2 in the checkpoint, 1 now"),
        ({"ema_decay": None}, "ema_decay: 0.9 in the checkpoint, None now"),
        ({"size": 12}, "number of training samples: 11 in the checkpoint, 12 now"),
    ]:
        with pytest.raises(ConfigError) as caught:
            list(trainer(tmp_path, resume_from_checkpoint="latest", **changes).train())
        assert message in str(caught.value)
    free = {"max_steps": 6, "logging_steps": 2, "save_steps": 1, "save_total_limit": 4, "progress": False}
    assert len(list(trainer(tmp_path, resume_from_checkpoint="latest", **free).train())) == 1


# --- damage -----------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {"flip": flip, "truncate": truncate, "delete": Path.unlink}


def test_damage_to_any_file_is_named_and_the_previous_checkpoint_taken(tmp_path, caplog):
    list(trainer(tmp_path / "run").train())
    files = sorted(
        p.relative_to(tmp_path / "run") for p in (tmp_path / "run" / "checkpoint-12").rglob("*") if p.is_file()
    )
    assert len(files) == 6
    for file in files:
        for name, damage in DAMAGE.items():
            copy = tmp_path / f"{name}-{file.name}-{file.parent.name}"
            shutil.copytree(tmp_path / "run", copy)
            damage(copy / file)
            caplog.clear()
            assert latest_checkpoint(copy) == copy / "checkpoint-10"
            assert "passed over" in caplog.text and "checkpoint-12" in caplog.text and file.name in caplog.text
            objective = toys.Regression(toys.make_net(dropout=0.3))
            before = toys.tensors(objective.net_)
            with pytest.raises(CheckpointError, match=file.name):
                list(trainer(copy, objective, resume_from_checkpoint=str(copy / "checkpoint-12")).train())
            assert toys.same(toys.tensors(objective.net_), before)
            shutil.rmtree(copy)


def test_a_checkpoint_under_another_name_is_damaged(tmp_path, caplog):
    list(trainer(tmp_path).train())
    (tmp_path / "checkpoint-12").rename(tmp_path / "checkpoint-20")
    with pytest.raises(CheckpointError, match="checkpoint-20: its name says step 20, its manifest says step 12"):
        list(trainer(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-20")).train())
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-10" and "says step 12" in caplog.text
    shutil.copytree(tmp_path / "checkpoint-10", tmp_path / "best")  # a name without a step is free
    assert choose_checkpoint(tmp_path / "new", str(tmp_path / "best")) == tmp_path / "best"
    with pytest.raises(CheckpointError, match="folder of a training run.*checkpoint-20"):
        choose_checkpoint(tmp_path / "new", str(tmp_path))


def test_resume_falls_back_and_ends_bit_equal(tmp_path):
    whole = trainer(tmp_path)
    list(whole.train())
    (tmp_path / "checkpoint-12" / "manifest.json").unlink()
    flip(tmp_path / "checkpoint-10" / "trainer.json")
    again = trainer(tmp_path, resume_from_checkpoint="latest")
    assert [e.step for e in again.train()] == list(range(6, 13))
    assert toys.same(everything(again), everything(whole))
    assert [s for s, _ in checkpoints(tmp_path)] == [12, 10, 5]  # written again
    assert len(list(tmp_path.glob("damaged-checkpoint-*"))) == 2  # and nothing thrown away
    for _, folder in checkpoints(tmp_path):
        flip(folder / "trainer.json")
    with pytest.raises(CheckpointError, match="none of checkpoint-12, checkpoint-10, checkpoint-5 verifies"):
        list(trainer(tmp_path, resume_from_checkpoint="latest").train())


def test_a_foreign_checkpoint_changes_nothing(tmp_path):
    list(trainer(tmp_path, max_steps=5).train())
    cases = [
        (toys.Regression(toys.make_net(width=9)), "0.weight has shape .8, 3. in the checkpoint, .9, 3. here"),
        (toys.TwoNetworks(torch.float32), "no networks/student.safetensors"),
        (toys.Regression(toys.make_net()[:1]), "lacks .*has .*beyond"),
    ]
    frozen = toys.Regression(toys.make_net(dropout=0.3))
    frozen.net_[0].requires_grad_(False)
    cases.append((frozen, "has .*0.bias.* beyond what this run trains"))
    for objective, message in cases:
        before = {n: toys.tensors(m) for n, m in objective.networks().items()}
        with pytest.raises(CheckpointError, match=message):
            list(trainer(tmp_path, objective, resume_from_checkpoint="latest").train())
        assert all(toys.same(toys.tensors(m), before[n]) for n, m in objective.networks().items())
    with pytest.raises(CheckpointError, match="no such folder"):
        list(trainer(tmp_path / "b", resume_from_checkpoint=str(tmp_path / "checkpoint-6")).train())


def test_a_checkpoint_without_its_average_is_refused(tmp_path):
    run = trainer(tmp_path, max_steps=5)
    for entry in run.train():
        if entry.step == 4:
            run.networks["net"].ema = None
    verify_folder(tmp_path / "checkpoint-5")
    with pytest.raises(CheckpointError, match="no ema/net.safetensors.*without a moving average"):
        list(trainer(tmp_path, resume_from_checkpoint="latest").train())


# --- non-finite numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_non_finite_step_updates_nothing_and_too_many_stop_the_run(tmp_path, bad, caplog):
    objective = toys.Regression(bad_steps=(4, 7, 8, 9, 10), bad=bad)
    run = trainer(tmp_path, objective, save_steps=2, save_total_limit=1, max_skipped_steps=3)
    seen = []
    with pytest.raises(
        DivergenceError, match="step 11.*samples .*max_skipped_steps=3.*checkpoint-10 is the last checkpoint"
    ):
        for entry in run.train():
            seen.append((entry, everything(run)))
    assert [e.step for e, _ in seen if e.skipped] == [5, 8, 9, 10]
    assert (
        toys.same(seen[4][1], seen[3][1])
        and toys.same(seen[9][1], seen[6][1])
        and not toys.same(seen[6][1], seen[5][1])
    )
    for entry, _ in seen:
        if entry.skipped:
            assert set(entry.sample_ids) == set(run.order.window(entry.step - 1).tolist())
            assert f"step {entry.step}: loss" in caplog.text and str(list(entry.sample_ids)) in caplog.text
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["skipped"]] == [5, 8, 9, 10, 11] and rows[-1]["sample_ids"]
    newest = latest_checkpoint(tmp_path)
    assert newest is not None and len(checkpoints(tmp_path)) == 1
    for file in newest.rglob("*.safetensors"):
        assert all(torch.isfinite(t).all() for t in load_tensors(file).values())
    assert toys.same(load_tensors(newest / "networks" / "net.safetensors"), toys.tensors(objective.net_))


def test_weights_that_became_non_finite_are_not_saved(tmp_path):
    run = trainer(tmp_path, toys.Regression(), save_steps=3)
    with pytest.raises(CheckpointError, match="networks/net: 0.weight is not finite"):
        for entry in run.train():
            if entry.step == 5:
                with torch.no_grad():
                    run.objective.net_[0].weight[0, 0] = float("inf")
                run.config = run.config.model_copy(update={"max_skipped_steps": 100})
    assert [step for step, _ in checkpoints(tmp_path)] == [3]


# --- keeping and losing folders ---------------------------------------------------------------------------------------


def test_only_the_newest_are_kept_but_never_only_damaged_ones(tmp_path, caplog):
    list(trainer(tmp_path, save_steps=2, save_total_limit=2).train())
    assert [step for step, _ in checkpoints(tmp_path)] == [12, 10]
    list(trainer(tmp_path, save_steps=1, max_steps=15, resume_from_checkpoint="latest").train())
    assert [step for step, _ in checkpoints(tmp_path)] == [15, 14, 13, 12, 10]
    for step in (15, 14):
        flip(tmp_path / f"checkpoint-{step}" / "trainer.json")
    prune_checkpoints(tmp_path, 2)
    assert len(checkpoints(tmp_path)) == 5 and "no newer checkpoint verifies" in caplog.text
    prune_checkpoints(tmp_path, 3)
    assert [step for step, _ in checkpoints(tmp_path)] == [15, 14, 13]


def test_leftovers_of_killed_saves_are_swept_at_the_start(tmp_path):
    (tmp_path / ".tmp-checkpoint-3-0123456789ab" / "networks").mkdir(parents=True)
    (tmp_path / ".tmp-log.jsonl").write_text("x")
    list(trainer(tmp_path, max_steps=2).train())
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_full_disk_fails_loudly_and_keeps_what_is_there(tmp_path, monkeypatch):
    import genkit.training.checkpoint as module

    real, calls = module.save_tensors, []

    def full(path, tensors):
        calls.append(path)
        if len(calls) == 5:  # the second checkpoint's second file
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, tensors)

    monkeypatch.setattr(module, "save_tensors", full)
    with pytest.raises(CheckpointError, match="checkpoint-10.*No space left.*saved before is unchanged"):
        list(trainer(tmp_path).train())
    assert [p.name for p in tmp_path.iterdir() if "checkpoint" in p.name] == ["checkpoint-5"]
    monkeypatch.setattr(module, "save_tensors", real)
    assert [e.step for e in trainer(tmp_path, resume_from_checkpoint="latest").train()] == list(range(6, 13))


def _train_with_small_files(folder: Path) -> None:
    """The kernel refuses writes beyond 2 kB a file, which only the second run's larger network needs."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    objective = toys.Regression(toys.make_net(width=300))
    list(trainer(folder, objective).train())


def test_a_write_that_the_kernel_refuses_leaves_no_checkpoint(tmp_path):
    child = processes.start(_train_with_small_files, tmp_path, quiet=True)
    child.join(60)
    assert child.exitcode == 1
    assert not [p for p in tmp_path.iterdir() if "checkpoint" in p.name]


def test_a_folder_that_cannot_be_written_is_an_error_before_training(tmp_path):
    (tmp_path / "file").write_text("in the way")
    objective = toys.Regression()
    with pytest.raises(CheckpointError, match="output_dir .*file/run: cannot be written"):
        list(trainer(tmp_path / "file" / "run", objective).train())
    assert objective.seen == []
    if os.geteuid() != 0:  # root writes where it likes
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(CheckpointError, match="cannot be written"):
            list(trainer(tmp_path / "locked").train())


# --- signals ----------------------------------------------------------------------------------------------------------


def test_sigterm_saves_at_the_end_of_the_step_and_the_handler_comes_back(tmp_path, caplog):
    caplog.set_level(logging.INFO, "genkit.training")
    before = signal.getsignal(signal.SIGTERM)
    whole = trainer(tmp_path / "whole")
    list(whole.train())
    steps = []
    for entry in trainer(tmp_path / "cut").train():
        steps.append(entry.step)
        if entry.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
    assert steps == [1, 2, 3, 4] and [s for s, _ in checkpoints(tmp_path / "cut")] == [4]
    assert "SIGTERM: checkpoint-4 is saved" in caplog.text and not (tmp_path / "cut" / "pipeline").exists()
    assert signal.getsignal(signal.SIGTERM) is before
    again = trainer(tmp_path / "cut", resume_from_checkpoint="latest")
    list(again.train())
    assert toys.same(everything(again), everything(whole))


def _train_and_tell(folder: Path, told: Path) -> None:
    settings = {
        "save_steps": 2,
        "save_total_limit": 2,
        "max_steps": 100_000,
        "logging_steps": 100,
        "lr_scheduler": "constant",
    }
    run = trainer(folder, resume_from_checkpoint="latest", **settings)
    with told.open("w") as file:
        for entry in run.train():
            file.write(f"{entry.step}\n")
            file.flush()


def test_kill_9_at_any_time_loses_at_most_save_steps(tmp_path):
    """Twenty runs of one training, each killed at a random moment; most of their time goes into saving."""
    told, moments, progress = tmp_path / "told", random.Random(0), 0
    for _ in range(20):
        child = processes.start(_train_and_tell, tmp_path / "run", told, quiet=True)
        deadline = time.monotonic() + 20
        while not (told.exists() and told.read_text()) and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(moments.uniform(0.0, 0.25))
        child.kill()
        child.join()
        reached = int(told.read_text().split()[-1])
        told.unlink()
        newest = latest_checkpoint(tmp_path / "run")
        found = 0 if newest is None else load_json(newest / "trainer.json")["step"]
        assert reached - found < 2 and found >= progress - 1  # nothing that was committed is lost
        assert child.exitcode == -signal.SIGKILL
        progress = max(progress, reached)
    assert progress >= 10
    settings = {"max_steps": progress + 3, "logging_steps": 100, "lr_scheduler": "constant"}
    whole = trainer(tmp_path / "whole", save_steps=1000, **settings)
    list(whole.train())
    resumed = trainer(tmp_path / "run", resume_from_checkpoint="latest", **(settings | {"save_steps": 2}))
    list(resumed.train())
    assert toys.same(everything(resumed), everything(whole)) and not list((tmp_path / "run").glob(".tmp-*"))
