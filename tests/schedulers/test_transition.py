"""Transitions: densities beside torch.distributions and brute force, purity, branching, masks, products."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical, Normal

from genkit.errors import ConfigError
from genkit.samplers import draw_keys
from genkit.schedulers import (
    CategoricalTransition,
    FlowScheduler,
    GaussianTransition,
    ProductScheduler,
    Transition,
    VPScheduler,
    WrappedNormalTransition,
)


def keys_of(count: int, seed: int = 0):
    return draw_keys(torch.Generator().manual_seed(seed), count)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---- Gaussian -------------------------------------------------------------------------------------------------------


def test_the_gaussian_density_is_torchs():
    mean, x, std = draw(0, 5, 3, 2), draw(1, 5, 3, 2), draw(2, 5).exp()
    expected = Normal(mean, std.reshape(5, 1, 1)).log_prob(x).sum((1, 2))
    close(GaussianTransition(mean, std).log_prob(x), expected)
    per_element = draw(3, 5, 3, 2).exp()
    close(GaussianTransition(mean, per_element).log_prob(x), Normal(mean, per_element).log_prob(x).sum((1, 2)))


def test_the_gaussian_sample_has_its_moments_and_reads_the_keys_alone():
    keys = keys_of(40_000)
    kernel = GaussianTransition(torch.full((40_000, 2), 3.0), torch.full((40_000,), 0.5))
    x = kernel.sample(keys)
    assert torch.equal(x, kernel.sample(keys)) and torch.equal(kernel.mode, kernel.mean)
    assert abs(float(x.mean()) - 3.0) < 4.5 * 0.5 / math.sqrt(80_000)
    assert abs(float(x.std()) - 0.5) < 4.5 * 0.5 / math.sqrt(160_000)


def test_transitions_follow_the_protocol():
    for kernel in (
        GaussianTransition(torch.zeros(1, 2), torch.ones(1)),
        CategoricalTransition(torch.zeros(1, 2, 3)),
        WrappedNormalTransition(torch.zeros(1, 2), torch.ones(1)),
    ):
        assert isinstance(kernel, Transition)


# ---- categorical ----------------------------------------------------------------------------------------------------


def test_the_categorical_density_is_torchs_and_its_samples_follow_it():
    logits = draw(4, 3, 4)
    kernel = CategoricalTransition(logits[:, None])
    x = torch.tensor([[1], [3], [0]])
    close(kernel.log_prob(x), Categorical(logits=logits).log_prob(x[:, 0]))
    assert torch.equal(kernel.mode[:, 0], logits.argmax(-1))
    n = 60_000
    samples = CategoricalTransition(logits[:1].expand(n, 4)).sample(keys_of(n))
    share = torch.bincount(samples, minlength=4).double() / n
    p = logits[0].softmax(-1)
    assert bool(((share - p).abs() < 4.5 * (p * (1 - p) / n).sqrt()).all())


def test_impossible_classes_are_never_drawn_and_have_density_0():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]]).expand(20_000, 5)
    kernel = CategoricalTransition(logits)
    assert set(kernel.sample(keys_of(20_000)).tolist()) == {1, 3}
    assert float(kernel.log_prob(torch.zeros(20_000, dtype=torch.long))[0]) == -math.inf


# ---- wrapped normal -------------------------------------------------------------------------------------------------

WIDTHS = (0.004, 0.05, 0.2, 0.499, 0.501, 0.9, 2.0, 30.0)


@pytest.mark.parametrize("std", WIDTHS)
def test_the_wrapped_density_is_the_sum_over_images(std):
    mean = torch.tensor([[0.13], [0.97], [-2.4], [5.0]], dtype=torch.float64)
    x = torch.tensor([[0.2], [0.01], [0.75], [0.5]], dtype=torch.float64)
    if std < 0.01:
        x = mean + 3 * std  # far out the narrow density underflows
    images = torch.arange(-400, 401, dtype=torch.float64)
    brute = Normal(mean, std).log_prob(x + images).logsumexp(1)
    kernel = WrappedNormalTransition(mean, torch.full((4,), std, dtype=torch.float64))
    close(kernel.log_prob(x), brute, 1e-11)
    close(kernel.log_prob(x + 3), brute, 1e-9)
    close(kernel.log_prob(torch.remainder(x, 1)), brute, 1e-9)


@pytest.mark.parametrize("std", WIDTHS)
def test_the_wrapped_density_integrates_to_1(std):
    n = 4000
    grid = ((torch.arange(n, dtype=torch.float64) + 0.5) / n).reshape(n, 1)
    kernel = WrappedNormalTransition(torch.full((n, 1), 0.3, dtype=torch.float64), torch.full((n,), std))
    assert abs(float(kernel.log_prob(grid).exp().mean()) - 1.0) < 1e-9  # the midpoint rule is exact for smooth periods


def test_wrapped_samples_follow_the_density():
    n, bins = 40_000, 20
    kernel = WrappedNormalTransition(torch.full((n, 1), 0.9, dtype=torch.float64), torch.full((n,), 0.3))
    x = kernel.sample(keys_of(n))
    assert bool(((x >= 0) & (x < 1)).all()) and abs(float(kernel.mode[0]) - 0.9) < 1e-12
    counts = torch.histc(x, bins, 0, 1)
    fine = ((torch.arange(bins * 50, dtype=torch.float64) + 0.5) / (bins * 50)).reshape(-1, 1)
    density = WrappedNormalTransition(torch.full_like(fine, 0.9), torch.full((len(fine),), 0.3)).log_prob(fine).exp()
    expected = n * density.reshape(bins, 50).mean(1) / bins
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert chi2 < 43.8  # 99.9 % quantile with 19 degrees of freedom


def test_a_wrapped_sample_never_rounds_up_to_1():
    kernel = WrappedNormalTransition(torch.full((1, 1), -1e-12), torch.zeros(1))
    assert float(kernel.sample(keys_of(1))) == 0.0


# ---- masks and zero width -------------------------------------------------------------------------------------------


def test_masked_elements_add_0():
    mean, x, std = draw(0, 2, 4, 3), draw(1, 2, 4, 3), torch.tensor([0.3, 0.8])
    mask = torch.tensor([[True, True, False, False], [True, True, True, False]])
    poisoned = torch.where(mask[..., None], x, torch.full_like(x, math.nan))  # padding may hold anything
    for kind in (GaussianTransition, WrappedNormalTransition):
        masked = kind(mean, std, mask).log_prob(poisoned)
        for i, count in enumerate((2, 3)):
            close(masked[i : i + 1], kind(mean[i : i + 1, :count], std[i : i + 1]).log_prob(x[i : i + 1, :count]))
    logits, classes = draw(2, 2, 4, 5), torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
    masked = CategoricalTransition(logits, mask).log_prob(classes)
    close(masked[0], Categorical(logits=logits[0, :2]).log_prob(classes[0, :2]).sum())


@pytest.mark.parametrize("kind", [GaussianTransition, WrappedNormalTransition])
def test_a_zero_width_has_no_density(kind):
    kernel = kind(torch.zeros(2, 3), torch.tensor([0.5, 0.0]))
    with pytest.raises(ConfigError, match="width 0.*eta > 0"):
        kernel.log_prob(torch.zeros(2, 3))
    scores = kernel.unchecked_log_prob(torch.zeros(2, 3))
    assert math.isnan(float(scores[1])) and math.isfinite(float(scores[0]))


def test_an_empty_batch_has_an_empty_density():
    assert GaussianTransition(torch.zeros(0, 3), torch.ones(0)).log_prob(torch.zeros(0, 3)).shape == (0,)


# ---- pure and branchable --------------------------------------------------------------------------------------------

SCHEDULERS = {
    "flow": FlowScheduler(),
    "cosine": VPScheduler("cosine"),
    "linear": VPScheduler("linear", "epsilon"),
    "edm": VPScheduler("edm", "sample"),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_mixed_times_equal_separate_calls(name, eta):
    scheduler = SCHEDULERS[name]
    t = torch.tensor([1.0, 0.8, 0.5, 0.5, 0.2, 0.0])
    s = torch.tensor([0.9, 0.8, 0.0, 0.1, 0.15, 0.0])
    x, output, context = draw(0, 6, 3), draw(1, 6, 3), {"scale": draw(2, 6).exp()}
    held = [v.clone() for v in (x, output, t, s, context["scale"])]
    mixed = scheduler.transition(output, t, s, x, context, eta=eta)
    again = scheduler.transition(output, t, s, x, context, eta=eta)
    assert torch.equal(mixed.mean, again.mean) and torch.equal(mixed.std, again.std)
    for value, before in zip((x, output, t, s, context["scale"]), held, strict=True):
        assert torch.equal(value, before)
    for i in range(6):
        part = {"scale": context["scale"][i : i + 1]}
        alone = scheduler.transition(output[i : i + 1], float(t[i]), float(s[i]), x[i : i + 1], part, eta=eta)
        # t as a Python number is not rounded to float32
        close(mixed.mean[i : i + 1], alone.mean, 1e-6)
        scalar = scheduler.transition(output[i : i + 1], t[i], s[i], x[i : i + 1], part, eta=eta)
        close(mixed.mean[i : i + 1], scalar.mean)
        close(mixed.std[i : i + 1], scalar.std.expand(1))
    for i in (1, 5):  # s = t stays
        assert torch.equal(mixed.mean[i], x[i]) and float(mixed.std[i]) == 0.0
    assert float(mixed.std[2]) == 0.0  # s = 0 is deterministic
    assert bool((mixed.std[[0, 3, 4]] > 0).all()) == (eta > 0)
    close(mixed.mean[2], scheduler.to_x0(output, t, x, context)[2])


def test_branches_of_one_state_differ_only_in_their_noise():
    scheduler = VPScheduler("cosine")
    x, output = draw(0, 1, 3), draw(1, 1, 3)
    kernel = scheduler.transition(output.expand(4, 3), 0.6, 0.4, x.expand(4, 3), eta=1.0)
    branches = kernel.sample(keys_of(4))
    assert len({tuple(b.tolist()) for b in branches}) == 4
    alone = scheduler.transition(output, 0.6, 0.4, x, eta=1.0)
    assert torch.equal(branches[2:3], alone.sample(keys_of(4)[2:3]))


def test_eta_of_a_call_leaves_the_scheduler_alone():
    scheduler = VPScheduler("cosine", eta=1.0)
    x = draw(0, 2, 3)
    before = scheduler.transition(x, 0.5, 0.3, x).std
    assert float(scheduler.transition(x, 0.5, 0.3, x, eta=0.0).std.max()) == 0.0
    assert torch.equal(before, scheduler.transition(x, 0.5, 0.3, x).std) and scheduler.eta == 1.0


# ---- products -------------------------------------------------------------------------------------------------------


def crystal(seed: int):
    state = {"lattice": draw(seed, 3, 3, 3), "coords": draw(seed + 1, 3, 5, 3)}
    state["mask"] = torch.tensor([[True] * 5, [True] * 2 + [False] * 3, [True] * 4 + [False]])
    return state


def product() -> ProductScheduler:
    return ProductScheduler({"lattice": VPScheduler("cosine"), "coords": FlowScheduler(eta=0.7)}, {"coords": "mask"})


def test_a_product_acts_field_by_field_and_passes_the_mask():
    scheduler, x, output = product(), crystal(0), crystal(5)
    t, s = torch.tensor([0.9, 0.5, 0.3]), torch.tensor([0.7, 0.2, 0.1])
    kernel = scheduler.transition(output, t, s, x)
    keys = keys_of(3).at(purpose="transition")
    sample = kernel.sample(keys)
    assert sample["mask"] is x["mask"] and set(sample) == set(x)
    parts = {}
    for name, part in scheduler.schedulers.items():
        parts[name] = part.transition(output[name], t, s, x[name])
        close(kernel.mode[name], parts[name].mean)
        assert torch.equal(sample[name], parts[name].sample(keys.at(purpose=f"transition/{name}")))
        close(scheduler.to_x0(output, t, x)[name], part.to_x0(output[name], t, x[name]))
    lattice = parts["lattice"].log_prob(sample["lattice"])
    coords = Normal(parts["coords"].mean, parts["coords"].std.reshape(3, 1, 1)).log_prob(sample["coords"])
    coords = (coords.sum(-1) * x["mask"]).sum(1)
    close(kernel.log_prob(sample), lattice + coords)


def test_a_field_walks_at_its_own_power_of_the_time():
    """All methods see t^p, float and tensor alike, and the configuration keeps p."""
    plain, x, output = product(), crystal(0), crystal(5)
    powered = ProductScheduler(plain.schedulers, plain.masks, {"lattice": 3.0})
    powered = ProductScheduler.from_config(powered.config)
    t, s = torch.tensor([0.9, 0.5, 0.3]), torch.tensor([0.7, 0.2, 0.0])
    for a, b in ((t, s), (0.9, 0.7)):
        alike, ahead = plain.transition(output, a, b, x), plain.transition(output, a**3, b**3, x)
        found = powered.transition(output, a, b, x)
        close(found.parts["lattice"].mean, ahead.parts["lattice"].mean)
        close(found.parts["lattice"].std, ahead.parts["lattice"].std)
        close(found.parts["coords"].mean, alike.parts["coords"].mean)
        close(powered.to_x0(output, a, x)["lattice"], plain.to_x0(output, a**3, x)["lattice"])
        close(powered.add_noise(x, output, a)["lattice"], plain.add_noise(x, output, a**3)["lattice"])
    assert torch.equal(powered.transition(output, t, torch.zeros(3), x).mode["mask"], x["mask"])


def test_fields_read_independent_streams():
    scheduler = ProductScheduler({"a": FlowScheduler(), "b": FlowScheduler()})
    prior = scheduler.prior(keys_of(3), {"a": (4,), "b": (4,)})
    assert not torch.equal(prior["a"], prior["b"])


def test_a_product_names_what_is_wrong():
    with pytest.raises(ConfigError, match="at least one field"):
        ProductScheduler({})
    with pytest.raises(ConfigError, match="field 'a'.*no pure transition"):
        ProductScheduler({"a": object()})
    with pytest.raises(ConfigError, match="'coord', which has no scheduler.*Did you mean 'coords'"):
        ProductScheduler({"coords": FlowScheduler()}, {"coord": "mask"})
    with pytest.raises(ConfigError, match="powers names the field 'coord'.*Did you mean 'coords'"):
        ProductScheduler({"coords": FlowScheduler()}, powers={"coord": 2.0})
    with pytest.raises(ConfigError, match=r"powers\['coords'\].*above 0"):
        ProductScheduler({"coords": FlowScheduler()}, powers={"coords": 0.0})
    with pytest.raises(ConfigError, match="FlowSchedule.*no genkit scheduler.*Did you mean 'FlowScheduler'"):
        ProductScheduler({"a": {"class": "FlowSchedule"}})
    with pytest.raises(ConfigError, match="no field 'coords'"):
        product().transition({"lattice": torch.zeros(3, 3, 3)}, 0.5, 0.2, crystal(0))
    with pytest.raises(ConfigError, match="expected a dict with the field"):
        product().transition(crystal(0), 0.5, 0.2, torch.zeros(3, 3))
