"""The command line: exit codes, messages, launchers, signals and kills of real processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from training import run_toy, toys

from genkit.serialization import load_tensors, verify_folder
from genkit.training.checkpoint import checkpoints, latest_checkpoint
from genkit.training.trainer import Trainer

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(run_toy.__file__))


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text(
        f"method: toy\noutput_dir: {tmp_path / 'run'}\nmax_steps: 60\nsave_steps: 10\nbatch_size: 2\n"
        "learning_rate: 1e-2\ngradient_accumulation_steps: 2\nema_decay: 0.9\nprogress: false\ndevice: cpu\n"
    )
    return path


@pytest.fixture(autouse=True)
def quiet_logging():
    import logging

    yield
    logger = logging.getLogger("genkit")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def start(*arguments: str, **env: str) -> subprocess.Popen:
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR")
    }
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean | env, cwd=ROOT
    )


def test_train_saves_all_that_was_promised_and_returns_0(config, tmp_path, capfd):
    assert run_toy.main([str(config), "max_steps=7", "toy.dropout=0.1", "resume_from_checkpoint=latest"]) == 0
    assert "no checkpoint, starting fresh" in capfd.readouterr().err
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["max_steps"] == 7 and saved["toy"] == {"size": 20, "dropout": 0.1, "width": 8}
    assert set(load_tensors(tmp_path / "run" / "pipeline" / "net.safetensors")) == set(toys.make_net().state_dict())
    verify_folder(tmp_path / "run" / "checkpoint-7")
    assert run_toy.main([str(config), "max_steps=7", "toy.dropout=0.1", "resume_from_checkpoint=latest"]) == 0
    assert "max_steps=7 is already reached" in capfd.readouterr().err


def test_failures_are_one_message_and_not_0(config, tmp_path, capfd):
    for arguments, message in [
        ([str(tmp_path / "nothing.yaml")], "error: " + str(tmp_path / "nothing.yaml") + ": no such configuration file"),
        ([str(config), "toy.widht=3"], "command line: toy.widht: unknown key. Did you mean 'width'?"),
        ([str(config), "method=tyo"], "method 'tyo' is not known"),
        ([str(config), "batch_size=21"], "batch_size 21"),
        ([str(config), "num_processes=2"], "num_processes: 2 asked for, 1 running"),
        ([str(config), "resume_from_checkpoint=" + str(tmp_path / "checkpoint-3")], "no such folder"),
    ]:
        assert run_toy.main(arguments) == 2
        error = capfd.readouterr().err
        assert message in error and "Traceback" not in error
    with pytest.raises(SystemExit) as caught:
        run_toy.main(["--help"])
    text = capfd.readouterr().out
    assert caught.value.code == 0 and "accelerate launch" in text and "resume_from_checkpoint=latest" in text
    with pytest.raises(SystemExit) as caught:
        run_toy.main([])
    assert caught.value.code == 2


def test_an_interrupt_says_what_is_kept(config, tmp_path, capfd, monkeypatch):
    real = Trainer._run_step

    def interrupt_at_15(self, stop):
        if self.step == 15:
            raise KeyboardInterrupt
        return real(self, stop)

    monkeypatch.setattr(Trainer, "_run_step", interrupt_at_15)
    assert run_toy.main([str(config), "save_steps=20"]) == 130
    error = capfd.readouterr().err
    assert f"interrupted: {tmp_path / 'run'} has no checkpoint yet" in error and "latest" not in error
    assert run_toy.main([str(config)]) == 130
    error = capfd.readouterr().err
    assert f"{tmp_path / 'run' / 'checkpoint-10'} is kept; continue with resume_from_checkpoint=latest" in error


def test_a_real_process_stops_on_sigterm_and_the_next_one_ends_bit_equal(config, tmp_path):
    """The first is stopped in the middle of an epoch; the second is this process."""
    process = start(sys.executable, SCRIPT, str(config), "logging_steps=1", "max_steps=5000", "save_steps=1000")
    wait_for(lambda: (tmp_path / "run" / "log.jsonl").exists() and len(rows_so_far(tmp_path / "run")) > 3)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    (step, folder), *others = checkpoints(tmp_path / "run")
    assert not others and f"SIGTERM: checkpoint-{step} is saved" in error and rows(tmp_path / "run")[-1]["step"] == step
    end = step + 7
    settings = [str(config), f"max_steps={end}", "logging_steps=1"]
    assert run_toy.main([*settings, "resume_from_checkpoint=latest"]) == 0
    assert run_toy.main([*settings, f"output_dir={tmp_path / 'whole'}", "save_steps=1000"]) == 0
    for name in ("networks", "ema", "optimizers"):
        part = Path(f"checkpoint-{end}") / name / "net.safetensors"
        assert toys.same(load_tensors(tmp_path / "run" / part), load_tensors(tmp_path / "whole" / part))
    kept = [{k: v for k, v in row.items() if k != "seconds"} for row in rows(tmp_path / "run")]
    assert kept == [{k: v for k, v in row.items() if k != "seconds"} for row in rows(tmp_path / "whole")]


def rows_so_far(folder: Path) -> list[str]:
    return (folder / "log.jsonl").read_text().splitlines()


@pytest.mark.slow
def test_three_kills_of_real_processes_lose_at_most_save_steps(config, tmp_path):
    moments = random.Random(1)
    for _ in range(3):
        settings = (
            "resume_from_checkpoint=latest",
            "logging_steps=1",
            "max_steps=100000",
            "save_steps=4",
            "save_total_limit=2",
        )
        process = start(sys.executable, SCRIPT, str(config), *settings)
        before = len(rows_so_far(tmp_path / "run")) if (tmp_path / "run" / "log.jsonl").exists() else 0
        wait_for(
            lambda n=before: (tmp_path / "run" / "log.jsonl").exists() and len(rows_so_far(tmp_path / "run")) > n + 6
        )
        time.sleep(moments.uniform(0.0, 0.3))
        process.kill()
        process.communicate()
        reached = json.loads(rows_so_far(tmp_path / "run")[-1])["step"]
        newest = latest_checkpoint(tmp_path / "run")
        assert newest is not None and reached - int(newest.name.split("-")[1]) <= 4


@pytest.mark.slow
@pytest.mark.multiproc
def test_accelerate_launch_runs_two_processes_and_never_one_in_silence(config, tmp_path):
    launch = (sys.executable, "-m", "accelerate.commands.launch")
    files = ROOT / "configs" / "accelerate"
    two = start(
        *launch,
        "--config_file",
        str(files / "cpu2.yaml"),
        "--main_process_port",
        "0",
        SCRIPT,
        str(config),
        "num_processes=2",
        GLOO_SOCKET_IFNAME="lo",
    )
    _, error = two.communicate(timeout=110)
    assert two.returncode == 0, error
    state = json.loads((tmp_path / "run" / "checkpoint-60" / "trainer.json").read_text())
    assert state["world_size"] == 2
    one = start(
        *launch,
        "--config_file",
        str(files / "cpu.yaml"),
        SCRIPT,
        str(config),
        f"output_dir={tmp_path / 'one'}",
        "max_steps=3",
    )
    silent = start(*launch, "--cpu", "--num_processes", "2", SCRIPT, str(config), f"output_dir={tmp_path / 'silent'}")
    _, error = one.communicate(timeout=110)
    assert one.returncode == 0, error
    _, error = silent.communicate(timeout=110)
    assert silent.returncode != 0 and "asked for several processes and started 1" in error


def test_the_accelerate_files_are_complete_and_known_to_accelerate(tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    files = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
    assert [f.stem for f in files] == ["cpu", "cpu2", "ddp", "fsdp2"]
    for file in files:
        loaded = load_config_from_file(str(file))  # an unknown key is an error there
        assert loaded.num_processes == (1 if file.stem == "cpu" else 2)
        assert loaded.distributed_type == yaml.safe_load(file.read_text())["distributed_type"]


def test_messages_follow_stderr_when_a_program_exchanges_it(tmp_path, monkeypatch):
    """Called twice in one process, each call writes to the stderr of its own time."""
    import io

    from genkit import train

    for _ in range(2):
        stream = io.StringIO()
        monkeypatch.setattr("sys.stderr", stream)
        train._show_messages()
        train.logging.getLogger("genkit.training").info("hello")
        assert "INFO: hello" in stream.getvalue()
        stream.close()
