"""What holds for every test: one thread per process, no windows, no network, the same examples in every run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

# before torch and numpy start their thread pools
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
hypothesis.settings.register_profile("genkit", deadline=None, derandomize=True, database=None, max_examples=50)
hypothesis.settings.load_profile("genkit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a CUDA device are skipped by name where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def make_scheduler() -> Callable[..., Any]:
    """``make_scheduler(name, prediction_type, **options)`` for "flow", "shifted_flow" and the VP schedules."""
    from genkit.schedulers import FlowScheduler, VPScheduler

    def make(name: str, prediction_type: str | None = None, **options: Any) -> Any:
        if prediction_type is not None:
            options["prediction_type"] = prediction_type
        if name == "flow":
            return FlowScheduler(**options)
        if name == "shifted_flow":
            return FlowScheduler(shift=3.0, **options)
        return VPScheduler(name, **options)

    return make
