"""Adapters from peft, compiled networks and the tensorboard tracker."""

from __future__ import annotations

import pytest
import torch
from training import toys

from genkit.serialization import load_tensors
from genkit.training import Trainer

pytestmark = pytest.mark.slow


def _adapted() -> toys.Regression:
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = peft.LoraConfig(r=2, target_modules=["0", "3"], lora_dropout=0.1)
        return toys.Regression(peft.get_peft_model(toys.make_net(), settings))


def test_an_adapter_is_trained_saved_and_resumed_alone(tmp_path):
    settings = {"ema_decay": 0.9, "save_steps": 5}
    whole, cut, again = _adapted(), _adapted(), _adapted()
    base = {k: v for k, v in toys.tensors(whole.net_).items() if "lora" not in k}
    list(Trainer(whole, toys.config(tmp_path / "whole", **settings), toys.make_data()).train())
    for entry in Trainer(cut, toys.config(tmp_path / "cut", **settings), toys.make_data()).train():
        if entry.step == 7:
            break
    resumed = toys.config(tmp_path / "cut", resume_from_checkpoint="latest", **settings)
    list(Trainer(again, resumed, toys.make_data()).train())
    assert toys.same(toys.tensors(again.net_), toys.tensors(whole.net_))
    assert toys.same({k: v for k, v in toys.tensors(whole.net_).items() if "lora" not in k}, base)
    names = set(load_tensors(tmp_path / "whole" / "checkpoint-12" / "networks" / "net.safetensors"))
    assert len(names) == 4 and all("lora_" in name for name in names)


class Network(torch.nn.Module):
    """torch.compile passes over a bare nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.body = toys.make_net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def test_a_compiled_network_trains_the_same(tmp_path):
    losses = {}
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for compiled in (False, True):
        config = toys.config(tmp_path / str(compiled), compile=compiled, batch_size=5)
        losses[compiled] = [
            entry.loss for entry in Trainer(toys.Regression(Network()), config, toys.make_data()).train()
        ]
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_tensorboard_gets_the_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = toys.config(tmp_path, report_to=["tensorboard"])
    logs = list(Trainer(toys.Regression(), config, toys.make_data()).train())
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, pytest.approx(e.value)) for e in events.Scalars("loss")] == [(e.step, e.loss) for e in logs]
