"""Schedulers by name, one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from genkit.schedulers import FlowScheduler, VPScheduler


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_scheduler() -> Callable[..., Any]:
    """``make_scheduler(name, prediction_type, **options)`` for "flow", "shifted_flow" and the VP schedules."""

    def make(name: str, prediction_type: str | None = None, **options: Any) -> Any:
        if prediction_type is not None:
            options["prediction_type"] = prediction_type
        if name == "flow":
            return FlowScheduler(**options)
        if name == "shifted_flow":
            return FlowScheduler(shift=3.0, **options)
        return VPScheduler(name, **options)

    return make
