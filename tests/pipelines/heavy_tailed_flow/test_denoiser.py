"""The preconditioner, the conditional scale and the objective against closed forms."""

import math

import pytest
import torch

from genkit.errors import ConfigError
from genkit.pipelines.heavy_tailed_flow.clocks import GaussianClock, StableClock, StudentTClock
from genkit.pipelines.heavy_tailed_flow.coupling import couple_clocks
from genkit.pipelines.heavy_tailed_flow.denoiser import ClockDenoiser, ConditionalScale, DataTransform, soft_clip
from genkit.pipelines.heavy_tailed_flow.objective import HeavyTailedFlowObjective
from genkit.samplers import rollout, training_keys
from genkit.schedulers import FlowScheduler

A, S, MU = 9.0, 0.7, 1.5


def make_denoiser(clock=None, channels=2, coupling="independent", **options):
    clock = clock or StudentTClock(4.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ClockDenoiser(channels, clock.to_dict(), width=16, blocks=1, coupling=coupling, **options)


def keys_for(n, step=0, seed=0):
    return training_keys(seed, step, torch.arange(n))


def gaussian_field(x, t, cond=None):
    """The exact velocity √A E[ε | x_t] − E[x_0 | x_t] for x_0 ~ N(MU, S²) and clock A, in float64."""
    t = t.double().unsqueeze(1)
    d = (1 - t) ** 2 * S**2 + t**2 * A
    return (t * A - (1 - t) * S**2) / d * (x - (1 - t) * MU) - MU


def test_conditional_gaussian_field_has_the_published_slope_and_residual():
    denoiser = make_denoiser()
    denoiser.conditional_scale.log_scale.fill_(math.log(S))
    clock, t = torch.tensor([A]), torch.tensor([0.4], dtype=torch.float64)
    c_skip, c_out, c_in = denoiser.coefficients(t, clock)
    assert c_skip.item() == pytest.approx(2.0453, abs=5e-5)
    assert c_out.item() ** 2 == pytest.approx(2.7283, abs=5e-5)
    d = 0.6**2 * S**2 + 0.4**2 * A
    assert c_in.item() == pytest.approx(d**-0.5, rel=1e-6)
    for end, value in ((1.0, 1.0), (0.0, -1.0)):
        assert denoiser.coefficients(torch.tensor([end]), clock)[0].item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(("steps", "end"), [(4, 1.8672), (8, 2.0224), (20, 2.1244), (50, 2.1688)])
def test_euler_walk_with_a_clock_scale(steps, end):
    """The exact end is μ + s ε = 2.2 for x(1) = √A ε = 3; plain Euler has known errors."""
    context = {"scale": torch.tensor([math.sqrt(A)])}
    start = torch.tensor([[3.0]], dtype=torch.float64)
    out = rollout(gaussian_field, FlowScheduler(), start, num_inference_steps=steps, context=context)
    assert out.sample.item() == pytest.approx(end, abs=6e-5)


@pytest.mark.parametrize("solver", ["heun", "midpoint", "dpmpp_2s", "dpmpp_2m", "unipc"])
def test_second_order_solvers_reach_the_exact_end_with_a_clock_scale(solver):
    context, start = {"scale": torch.tensor([3.0])}, torch.tensor([[3.0]], dtype=torch.float64)

    def error(name, n):
        out = rollout(gaussian_field, FlowScheduler(), start, num_inference_steps=n, context=context, solver=name)
        return abs(out.sample.item() - 2.2)

    # the multistep solvers start from infinite noise at first order, so their rate is between 2 and 4 here
    assert error(solver, 100) < error(solver, 50) / 2.2 and error(solver, 100) < error("euler", 100) / 5
    assert error("euler", 100) > error("euler", 50) / 2.1  # control: first order


def test_zero_network_is_the_exact_gaussian_field():
    """The output layer starts at 0, so a fresh denoiser is c_skip x: the field for centred Gaussian data of size s."""
    denoiser = make_denoiser(channels=1)
    x, t = torch.randn(64, 1, generator=torch.Generator().manual_seed(1)), torch.linspace(0, 1, 64)
    path = denoiser.clock.path(keys_for(64), 16)
    cond = {"clock": path[:, -1], "features": denoiser.features(path)}
    got = denoiser(x, t, cond)
    a, t = path[:, -1:], t.double().unsqueeze(1)
    d = (1 - t) ** 2 + t**2 * a
    assert torch.allclose(got.double(), (t * a - (1 - t)) / d * x, rtol=1e-5, atol=1e-6)


def test_residual_has_unit_variance_at_every_time_and_clock():
    """Var[(v − c_skip x)/c_out] = 1 for Gaussian data of size s: what the network regresses on is O(1)."""
    denoiser = make_denoiser(channels=1)
    denoiser.conditional_scale.log_scale.fill_(math.log(S))
    n = 200_000
    keys = keys_for(n)
    noise, x0 = keys.at(purpose="a").normal((1,)), S * keys.at(purpose="b").normal((1,))
    for a in (0.01, 1.0, 1e6):
        for time in (0.02, 0.5, 0.98):
            clock, t = torch.full((n,), a), torch.full((n,), time)
            context = {"scale": clock.sqrt()}
            scheduler = FlowScheduler()
            x_t, v = scheduler.add_noise(x0, noise, t, context), scheduler.target(x0, noise, t, context)
            c_skip, c_out, _ = (c.unsqueeze(1) for c in denoiser.coefficients(t, clock))
            assert ((v - c_skip * x_t) / c_out).std().item() == pytest.approx(1.0, abs=0.01)


def test_soft_clip_is_identity_then_logarithmic():
    x = torch.tensor([-1e6, -3.0, 0.5, 3.0, 4.0])
    expected = torch.tensor([-(3 + math.log(1e6 - 2)), -3.0, 0.5, 3.0, 3 + math.log(2.0)])
    assert torch.allclose(soft_clip(x), expected)


# ---- data transform and conditional scale ---------------------------------------------------------------------------


def test_whitening_gives_unit_covariance_and_round_trips():
    g = torch.Generator().manual_seed(0)
    data = (
        torch.randn(5000, 3, generator=g, dtype=torch.float64)
        @ torch.tensor([[2.0, 0, 0], [1, 1, 0], [0, 3, 0.5]]).double()
    )
    transform = DataTransform(3)
    transform.fit(data + 5.0, "whiten")
    z = transform.standardise(data + 5.0)
    assert torch.allclose(torch.cov(z.T), torch.eye(3, dtype=torch.float64), atol=1e-5)
    assert torch.allclose(transform.restore(z), data + 5.0, atol=1e-5)


def test_conditional_scale_of_a_scale_mixture_is_the_square_root_of_the_clock():
    """x_0 = √A Z ranked against its own clock: radius and clock quantiles pair up as r ∝ √A far out."""
    clock, n = StudentTClock(3.0), 200_000
    keys = keys_for(n)
    x0 = clock.terminal(keys).sqrt().unsqueeze(1) * keys.at(purpose="z").normal((2,), torch.float64)
    scale = ConditionalScale()
    scale.fit_rank(x0, clock)
    far = clock.upper_quantile(torch.tensor([1e-4, 1e-6], dtype=torch.float64))
    slope = (scale(far[1:]).log() - scale(far[:1]).log()) / (far[1].log() - far[0].log())
    assert slope.item() == pytest.approx(0.5, abs=1e-6)
    near = clock.quantile(torch.tensor([0.95, 0.995], dtype=torch.float64))
    slope = (scale(near[1:]).log() - scale(near[:1]).log()) / (near[1].log() - near[0].log())
    assert slope.item() == pytest.approx(0.5, abs=0.05)  # measured from the data, not set
    # E|x|²/d over the bulk equals E s(A)²: both are trimmed at the same 99 % quantile
    u = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000 * 0.98 + 0.01
    radius = x0.norm(dim=1).sort().values[int(0.01 * n) : int(0.99 * n)]
    assert scale(clock.quantile(u)).square().mean().item() == pytest.approx(radius.square().mean().item() / 2, rel=0.02)


def test_constant_scale_for_independent_coupling():
    denoiser = make_denoiser(channels=2, coupling="independent")
    data = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0)) * 3.0
    denoiser.fit(data, "none")
    scales = denoiser.conditional_scale(torch.tensor([0.01, 1.0, 1e9]))
    assert torch.allclose(scales, torch.full_like(scales, 3.0), rtol=0.03)
    assert scales.max() == scales.min()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.full((50, 2), float("nan")), "50 of 50 rows"),
        (torch.zeros(50, 2), "constant column"),
        (torch.randn(2, 2), "expected \\(n, d\\) with n > d"),
        (torch.randn(50, 3), "3 columns"),
        (torch.arange(100.0).reshape(50, 2), "determine one another"),
    ],
)
def test_unusable_data_is_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        DataTransform(2).fit(data, "whiten")


def test_data_without_spread_or_size_are_refused():
    mostly_zero = torch.zeros(500, 2)
    mostly_zero[:100] = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ConfigError, match="spread is 0"):
        DataTransform(2).fit(mostly_zero, "mad")
    with pytest.raises(ConfigError, match="size 0"):
        make_denoiser(coupling="rank").fit(mostly_zero, "none")


# ---- coupling -------------------------------------------------------------------------------------------------------


def test_rank_coupling_is_a_permutation_that_sorts():
    keys = keys_for(500)
    clock, radius = StudentTClock(2.0).terminal(keys), keys.at(purpose="r").exponential()
    order = couple_clocks("rank", clock, radius, keys.uniform())
    assert torch.equal(order.sort().values, torch.arange(500))
    assert torch.equal(clock[order].argsort(), radius.argsort())
    assert torch.equal(couple_clocks("independent", clock, radius, keys.uniform()), torch.arange(500))


def test_ties_are_broken_at_random():
    """A constant clock ranks to a random pairing, not to a sorted one."""
    keys = keys_for(1000)
    radius = keys.at(purpose="r").uniform()
    order = couple_clocks("rank", torch.ones(1000), radius, keys.uniform())
    assert abs(torch.corrcoef(torch.stack((order.double(), radius)))[0, 1].item()) < 0.1


def pairs_by_label(within: bool):
    """Two classes of size 1 and 10; the clocks each of them is paired with."""
    n = 4000
    keys = keys_for(n)
    labels = torch.arange(n) % 2
    radius = keys.at(purpose="r").exponential() * torch.where(labels == 0, 1.0, 10.0)
    clock = StudentTClock(3.0).terminal(keys)
    order = couple_clocks("rank", clock, radius, keys.uniform(), labels if within else None)
    return [clock[order][labels == k] for k in (0, 1)]


def test_ranking_within_labels_keeps_the_clock_law_of_each_class():
    from scipy.stats import ks_2samp

    within = pairs_by_label(True)
    assert ks_2samp(*within).pvalue > 0.01
    globally = pairs_by_label(False)
    assert ks_2samp(*globally).pvalue < 1e-12  # control: global ranking ties the clock to the class


# ---- objective ------------------------------------------------------------------------------------------------------


def loss_of(clock, coupling="independent", weight="velocity", seed=0):
    denoiser = make_denoiser(clock, coupling=coupling)
    data = torch.randn(300, 2, generator=torch.Generator().manual_seed(5))
    denoiser.fit(data, "whiten")
    objective = HeavyTailedFlowObjective(denoiser, FlowScheduler(), weight)
    batch = {"sample": data[:64], "sample_id": torch.arange(64)}
    return (
        objective,
        objective.loss("denoiser", batch, step=3, keys=training_keys(seed, 3, torch.arange(64))).loss,
        batch,
    )


def test_alpha_two_is_gaussian_flow_matching_bit_for_bit():
    """The stable law at α = 2 gives the Gaussian law's loss and gradients, and both the textbook loss."""
    objective, loss, batch = loss_of(StableClock(2.0))
    other, other_loss, _ = loss_of(GaussianClock())
    loss.backward(), other_loss.backward()
    assert torch.equal(loss, other_loss)
    grads, other_grads = ([p.grad for p in o.denoiser.parameters()] for o in (objective, other))
    assert all(torch.equal(g, h) for g, h in zip(grads, other_grads, strict=True) if g is not None)

    keys = training_keys(0, 3, torch.arange(64))
    x0, noise = objective.denoiser.transform.standardise(batch["sample"]), keys.at(purpose="noise").normal((2,))
    t = keys.at(purpose="time").uniform(dtype=torch.float32).unsqueeze(1)
    x_t = (1 - t) * x0 + t * noise
    path = GaussianClock().path(keys, 16)
    v = other.denoiser(x_t, t[:, 0], {"clock": path[:, -1], "features": other.denoiser.features(path)})
    s2 = other.denoiser.conditional_scale(torch.ones(1)).square().item()
    textbook = ((v - (noise - x0)).square().mean() / (1 + s2)).item()
    assert other_loss.item() == pytest.approx(textbook, rel=1e-6)
    assert not torch.equal(loss_of(StableClock(1.9))[1], other_loss)  # control


def test_loss_weights_have_their_meaning():
    """``residual``: a zero network on Gaussian data has loss 1 whatever the clock's law."""
    for clock in (StudentTClock(3.0), StableClock(1.3)):
        denoiser = make_denoiser(clock)
        data = torch.randn(60_000, 2, generator=torch.Generator().manual_seed(5))
        denoiser.fit(data, "whiten")
        objective = HeavyTailedFlowObjective(denoiser, FlowScheduler(), "residual")
        ids = torch.arange(len(data))
        loss = objective.loss("denoiser", {"sample": data}, step=0, keys=training_keys(1, 0, ids)).loss
        assert loss.item() == pytest.approx(1.0, abs=0.02)


def test_both_weights_keep_the_minimiser_because_the_network_sees_clock_and_time():
    """The best linear velocity at each (A, t) is the same under either weight; a weight that sees x_0 changes it."""
    g = torch.Generator().manual_seed(0)
    n = 4000
    x0, eps = torch.randn(n, generator=g).double(), torch.randn(n, generator=g).double()

    def slopes(weight_of):
        found = []
        for a, time in ((0.25, 0.3), (16.0, 0.3), (16.0, 0.8)):
            x_t, v = (1 - time) * x0 + time * math.sqrt(a) * eps, math.sqrt(a) * eps - x0
            w = weight_of(torch.full((n,), time), torch.full((n,), a, dtype=torch.float64)).double()
            found.append(((w * x_t * v).sum() / (w * x_t * x_t).sum()).item())
        return found

    plain = slopes(lambda t, a: torch.ones(n))
    for name in ("velocity", "residual"):
        objective, _, _ = loss_of(StudentTClock(3.0), weight=name)
        assert slopes(objective._weight) == pytest.approx(plain, rel=1e-6)
    assert slopes(lambda t, a: 1 / (1 + x0.square())) != pytest.approx(plain, rel=1e-2)  # control


def test_a_scheduler_of_another_prediction_type_and_an_unknown_weight_are_refused():
    denoiser = make_denoiser()
    with pytest.raises(ConfigError, match="the denoiser predicts 'flow'"):
        HeavyTailedFlowObjective(denoiser, FlowScheduler(prediction_type="sample"))
    with pytest.raises(ConfigError, match="loss_weight='velocit'"):
        HeavyTailedFlowObjective(denoiser, FlowScheduler(), loss_weight="velocit")


def test_denoiser_without_its_clock_is_refused():
    with pytest.raises(ConfigError, match="needs cond with 'clock' and 'features'"):
        make_denoiser()(torch.zeros(2, 2), torch.zeros(2), {"clock": torch.ones(2)})
