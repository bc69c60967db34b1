"""The moving average against its closed form, and the learning-rate curve."""

from __future__ import annotations

import math

import pytest
import torch
from training import toys

from genkit.errors import ConfigError
from genkit.training import EMA, Phase, Trainer
from genkit.training.optim import learning_rate


@pytest.mark.parametrize("start", [0, 3])
def test_the_average_is_its_closed_form(start):
    theta = [torch.randn(4, dtype=torch.float64) for _ in range(9)]
    live = {"w": theta[0].clone()}
    ema = EMA(live, decay=0.8, start_step=start)
    for k in range(1, 9):
        live["w"].copy_(theta[k])
        ema.update(live, k)
        d, s = 0.8, min(start, k)
        closed = d ** (k - s) * theta[s] + (1 - d) * sum(
            (d ** (k - j) * theta[j] for j in range(s + 1, k + 1)), torch.zeros(4)
        )
        torch.testing.assert_close(ema.shadow["w"], closed, rtol=1e-12, atol=1e-12)


def test_the_average_of_half_precision_weights_is_kept_in_float32():
    live = {"w": torch.ones(3, dtype=torch.bfloat16)}
    ema = EMA(live, decay=0.999)
    live["w"].add_(1.0)
    for k in range(1, 101):
        ema.update(live, k)
    assert ema.shadow["w"].dtype == torch.float32
    # the same recursion in bfloat16 would not move at all: 0.001 is below half its spacing at 1
    torch.testing.assert_close(ema.shadow["w"], torch.full((3,), 2 - 0.999**100), rtol=1e-4, atol=0)
    with ema.swapped_into(live):
        assert live["w"][0] == torch.tensor(2 - 0.999**100).bfloat16()
    assert torch.equal(live["w"], torch.full((3,), 2.0, dtype=torch.bfloat16))


def test_training_keeps_the_average_of_its_own_weights(tmp_path):
    objective = toys.Regression()
    trainer = Trainer(
        objective, toys.config(tmp_path, ema_decay=0.7, ema_start_step=4, max_steps=9), toys.make_data(), toys.save_net
    )
    weights = [toys.tensors(objective.net_)]
    weights += [toys.tensors(objective.net_) for _ in trainer.train()]
    for name, shadow in trainer.networks["net"].ema.shadow.items():
        expected = weights[4][name]
        for k in range(5, 10):
            expected = 0.7 * expected + 0.3 * weights[k][name]
        torch.testing.assert_close(shadow, expected, rtol=1e-5, atol=1e-6)
    from genkit.serialization import load_tensors

    saved = load_tensors(tmp_path / "pipeline" / "net.safetensors")  # the pipeline gets the average
    assert toys.same(saved, trainer.networks["net"].ema.shadow)
    assert toys.same(toys.tensors(objective.net_), weights[-1])  # and the live weights are put back


def test_rates_follow_their_formulas():
    assert [learning_rate(2.0, k, 100, warmup_steps=4) for k in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    for k in range(4, 100):
        p = (k - 4) / 96
        assert learning_rate(2.0, k, 100, scheduler="linear", warmup_steps=4) == pytest.approx(2 * (1 - p))
        assert learning_rate(2.0, k, 100, scheduler="cosine", warmup_steps=4) == pytest.approx(
            1 + math.cos(math.pi * p)
        )
    assert learning_rate(1.0, 5, 5, scheduler="cosine", warmup_steps=5) == 1.0


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_logged_rate_counts_updates_not_micro_batches(tmp_path, accumulation):
    settings = {
        "lr_scheduler": "cosine",
        "warmup_steps": 3,
        "gradient_accumulation_steps": accumulation,
        "batch_size": 1,
    }
    trainer = Trainer(toys.Regression(), toys.config(tmp_path, **settings), toys.make_data())
    rates = [entry.learning_rate for entry in trainer.train()]
    assert rates == [learning_rate(1e-2, k, 12, scheduler="cosine", warmup_steps=3) for k in range(12)]


def test_a_phase_s_factor_scales_its_rate(tmp_path):
    """Factors 0.5 and 0: the first phase is a run at half the rate, and in the second no weight moves."""

    class Scaled(toys.Regression):
        def __init__(self, *phases):
            super().__init__()
            self.phases_ = phases

        def phases(self):
            return self.phases_

    def weights_and_rates(name, rate, *phases):
        settings = toys.config(tmp_path / name, learning_rate=rate, lr_scheduler="cosine", warmup_steps=2, max_steps=9)
        objective = Scaled(*phases)
        trainer = Trainer(objective, settings, toys.make_data())
        return zip(*[(toys.tensors(objective.net_), e.learning_rate) for e in trainer.train()], strict=True)

    weights, rates = weights_and_rates("scaled", 1e-2, Phase("fit", 5, 0.5), Phase("rest", 4, 0.0))
    expected = [learning_rate(5e-3, k, 5, scheduler="cosine", warmup_steps=2) for k in range(5)]
    assert list(rates) == pytest.approx([*expected, 0.0, 0.0, 0.0, 0.0])
    halved, _ = weights_and_rates("halved", 5e-3, Phase("fit", 5))
    assert all(toys.same(a, b) for a, b in zip(weights[:5], halved, strict=True))
    assert not toys.same(weights[3], weights[4])
    assert all(toys.same(later, weights[4]) for later in weights[5:])
    with pytest.raises(ConfigError, match="learning_rate_factor"):
        Phase("fit", 5, -1.0)


def test_rates_and_averages_by_network(tmp_path):
    settings = {"learning_rate": {"student": 1e-2, "auxiliary": 0.0}, "ema_decay": {"student": 0.5}}
    objective = toys.TwoNetworks()
    before = toys.tensors(objective.auxiliary)
    trainer = Trainer(objective, toys.config(tmp_path, **settings), toys.make_data(dtype=torch.float64))
    list(trainer.train())
    assert toys.same(toys.tensors(objective.auxiliary), before)
    assert trainer.networks["auxiliary"].ema is None and trainer.networks["student"].ema is not None
    for changes, message in [
        ({"learning_rate": {"student": 1e-2}}, "auxiliary"),
        ({"ema_decay": {"studnet": 0.5}}, "Did you mean 'student'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            list(
                Trainer(
                    toys.TwoNetworks(), toys.config(tmp_path / "b", **changes), toys.make_data(dtype=torch.float64)
                ).train()
            )


def test_an_average_that_keeps_its_initial_weights_is_announced(tmp_path, caplog):
    """0.99^5 = 95 % of what a run of five steps averages is the untrained network."""
    for start, told in ((0, True), (3, False)):
        settings = toys.config(tmp_path / str(start), ema_decay=0.99, ema_start_step=start, max_steps=5)
        caplog.clear()
        list(Trainer(toys.Regression(), settings, toys.make_data()).train())
        assert ("95 % of the initial weights" in caplog.text) is told
