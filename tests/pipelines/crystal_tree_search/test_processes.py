"""One and two processes, by trees and by rewards, give the same archive."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["--objectives", "density", "scarcity", "--rollouts", "16", "--steps", "8", "--trees", "2"]


def archive(command: list[str], *options: str) -> str:
    """The hash that the script prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command, str(ROOT / "examples" / "search_by_trees.py"), *SMALL, *options],
        capture_output=True, text=True, env=environment, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()[-1]


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same_archive():
    alone = archive([])
    two = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
    assert archive([*two, "--mixed_precision", "no", "--dynamo_backend", "no"]) == alone
    assert archive([], "--reward-processes", "2") == alone
    assert archive([], "--rollouts", "17") != alone  # control: another search has another archive
