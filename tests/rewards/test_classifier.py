"""Rewards of a frozen network: by hand, by finite differences, and what must not happen to the network."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from genkit.errors import ConfigError
from genkit.models import FeatureNetwork
from genkit.rewards import (
    ClassEntropy,
    ClassifierLogProbability,
    FeatureSimilarity,
    Reward,
    WeightedSum,
    check_differentiable,
)

B, K = 6, 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def network(dropout: float = 0.5, seed: int = 0) -> FeatureNetwork:
    """A random classifier in training mode, float64, with logits far enough apart to matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = FeatureNetwork(2, 4, K, widths=[8], feature_channels=5, dropout=dropout).double()
    with torch.no_grad():
        net.output.weight.mul_(20.0)
    return net.train()


X, LABELS, TEXT = normal(B, 2, 4, 4), torch.arange(B) % K, normal(5, seed=1)
REWARDS = {
    "label": lambda net: ClassifierLogProbability(net),
    "target": lambda net: ClassifierLogProbability(net, 2),
    "entropy": lambda net: ClassEntropy(net),
    "sharp entropy": lambda net: ClassEntropy(net, temperature=0.5),
    "similarity": lambda net: FeatureSimilarity(net.features, TEXT),
    "similarity of logits": lambda net: FeatureSimilarity(net, TEXT[:K]),
}


def context() -> dict[str, Tensor]:
    return {"class_labels": LABELS}


@pytest.mark.parametrize("name", REWARDS)
def test_the_gradient_of_the_sum_is_finite_differences(name: str) -> None:
    reward = REWARDS[name](network())
    total = lambda x: reward(x, {"class_labels": LABELS[:3]}).values.sum()  # noqa: E731
    assert torch.autograd.gradcheck(total, (X[:3].clone().requires_grad_(),))
    check = check_differentiable(reward, X, context())
    assert check.ratio == pytest.approx(1, abs=0.1) and check.valid == B


@pytest.mark.parametrize("name", REWARDS)
def test_the_network_stays_as_it_is(name: str) -> None:
    net = network()
    net.blocks[0].eval()  # a mode of its own, which must come back
    net.stem.weight.requires_grad_(False)
    modes = [module.training for module in net.modules()]
    before = {key: value.clone() for key, value in net.state_dict().items()}
    reward, x = REWARDS[name](net), X.clone().requires_grad_()
    random_state = torch.get_rng_state()
    first = reward(x, context()).values
    first.sum().backward()  # the graph outlives the call: it must lead to x alone
    again, _ = reward.value_and_grad(X, context())
    assert torch.equal(first.detach(), again.values)  # dropout is off
    assert torch.equal(random_state, torch.get_rng_state())
    assert x.grad is not None and x.grad.any()
    assert all(parameter.grad is None for parameter in net.parameters())
    assert [module.training for module in net.modules()] == modes
    assert [p.requires_grad for p in net.parameters()] == [p is not net.stem.weight for p in net.parameters()]
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    # control: the bare network has neither property
    logits = net(X)
    assert logits.requires_grad and not torch.equal(logits, net(X))


def test_modes_come_back_after_an_error() -> None:
    net = network()
    with pytest.raises(ConfigError, match="expects"):
        ClassifierLogProbability(net, 0)(X[:, :1])
    assert net.training and all(p.requires_grad for p in net.parameters())


def test_log_probability_by_hand() -> None:
    net = network()
    logits = net.eval()(X).detach()
    expected = logits.log_softmax(dim=1)
    output = ClassifierLogProbability(net)(X, context())
    torch.testing.assert_close(output.values, expected[torch.arange(B), LABELS])
    assert float(output.logs["accuracy"]) == pytest.approx((logits.argmax(1) == LABELS).double().mean().item())
    for y in range(K):
        torch.testing.assert_close(ClassifierLogProbability(net, y)(X).values, expected[:, y])
    named = ClassifierLogProbability(net, label="digit", field="image")
    torch.testing.assert_close(named({"image": X}, {"digit": LABELS}).values, output.values)
    total = sum(ClassifierLogProbability(net, y)(X).values.exp() for y in range(K))
    torch.testing.assert_close(total, torch.ones(B, dtype=torch.float64))
    alone, slope = ClassifierLogProbability(net).value_and_grad(X[2:3], {"class_labels": LABELS[2:3]})
    _, slopes = ClassifierLogProbability(net).value_and_grad(X, context())
    torch.testing.assert_close(slope[0], slopes[2])


def test_ascent_on_the_log_probability_makes_the_network_sure() -> None:
    linear = nn.Sequential(nn.Flatten(), nn.Linear(32, K)).double()
    with torch.no_grad():
        linear[1].weight.copy_(0.3 * normal(K, 32, seed=7))
    reward, x = ClassifierLogProbability(linear, 3), X.clone()
    for _ in range(100):
        x = x + reward.value_and_grad(x)[1]
    output = reward(x)
    assert float(output.values.min()) > -0.1 and float(output.logs["accuracy"]) == 1.0


# --- the entropy of the batch -----------------------------------------------------------------------------------------


def inception_score_log(p: Tensor) -> float:
    """log IS = mean_b KL(p_b ‖ p̄), written out."""
    mean = p.mean(dim=0)
    return float(sum(sum(a * math.log(a / b) for a, b in zip(row, mean, strict=True)) for row in p.tolist()) / len(p))


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_the_mean_is_the_log_of_the_inception_score(temperature: float) -> None:
    net = network()
    p = (net.eval()(X).detach() / temperature).softmax(dim=1)
    output = ClassEntropy(net, temperature=temperature)(X)
    assert output.mean().item() == pytest.approx(inception_score_log(p), rel=1e-12)
    entropy = lambda q: -(q * q.log()).sum(dim=-1)  # noqa: E731
    assert float(output.logs["class_entropy"]) == pytest.approx(float(entropy(p.mean(dim=0))))
    assert float(output.logs["sample_entropy"]) == pytest.approx(float(entropy(p).mean()))
    assert float(output.values.min()) >= 0.0 and output.mean().item() < math.log(K)


class Logits(nn.Module):
    """The sample is its own logits."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_extremes_of_the_inception_score() -> None:
    reward = ClassEntropy(Logits())
    sure = 500.0 * torch.eye(K, dtype=torch.float64)
    assert reward(sure).values.tolist() == pytest.approx([math.log(K)] * K)  # one image of each class, sure
    assert reward(sure[:1].expand(5, K)).values.tolist() == pytest.approx([0.0] * 5)  # all of one class
    assert reward(torch.zeros(5, K)).values.tolist() == pytest.approx([0.0] * 5, abs=1e-6)  # all unsure
    rare = reward(torch.cat((sure[:1].expand(4, K), sure[1:2])))  # the rare class counts for more
    assert rare.values.tolist() == pytest.approx([math.log(5 / 4)] * 4 + [math.log(5)])


def test_the_term_through_the_batch_mean_is_zero_in_the_sum() -> None:
    """∇ Σ r_b with p̄ held fixed is the whole gradient, although each r_b's own gradient has a term through p̄."""
    logits = normal(B, K, seed=3).requires_grad_()
    log_p = logits.log_softmax(dim=1)
    p, log_mean = log_p.exp(), log_p.exp().mean(dim=0).log()
    fixed = (p * (log_p - log_mean.detach())).sum(dim=1)
    exact = (p * (log_p - log_mean)).sum(dim=1)
    (held,) = torch.autograd.grad(fixed.sum(), logits, retain_graph=True)
    _, found = ClassEntropy(Logits()).value_and_grad(logits.detach())
    torch.testing.assert_close(found, held, rtol=1e-12, atol=1e-15)
    one, other = (torch.autograd.grad(r[0], logits, retain_graph=True)[0] for r in (fixed, exact))
    assert float((one - other).abs().max()) > 0.01  # control: of one value it is not 0


def test_gradient_ascent_spreads_a_batch_over_the_classes() -> None:
    reward = ClassEntropy(Logits())
    x = 0.3 * normal(8, K, seed=4)
    for _ in range(300):
        x = x + 1.0 * reward.value_and_grad(x)[1]
    assert reward(x).mean().item() > 0.9 * math.log(K)
    assert torch.bincount(x.argmax(dim=1), minlength=K).min() >= 1


def test_what_cannot_be_judged_is_left_out_of_the_batch_mean() -> None:
    net = network()
    broken = X.clone()
    broken[1, 0, 0, 0] = math.nan
    kept = [0, 2, 3, 4, 5]
    output, gradient = ClassEntropy(net).value_and_grad(broken)
    expected, slope = ClassEntropy(net).value_and_grad(X[kept])
    assert output.valid.tolist() == [b in kept for b in range(B)] and not gradient[1].any()
    torch.testing.assert_close(output.values[kept], expected.values)
    torch.testing.assert_close(gradient[kept], slope)
    lonely, none = broken[:2], torch.full_like(X, math.nan)
    for x in (lonely, none):
        output, gradient = ClassEntropy(net).value_and_grad(x)
        assert not output.valid.any() and not gradient.any()
    labelled = ClassifierLogProbability(net)(broken, context())
    assert labelled.valid.tolist() == [b in kept for b in range(B)]


# --- similarity -------------------------------------------------------------------------------------------------------


def test_similarity_by_hand_and_from_the_context() -> None:
    net = network()
    features = net.eval().features(X).detach()
    expected = torch.nn.functional.cosine_similarity(features, TEXT.expand(B, 5))
    reward = FeatureSimilarity(net.features, TEXT)
    torch.testing.assert_close(reward(X).values, expected)
    torch.testing.assert_close(
        FeatureSimilarity(net.features, 7.0 * TEXT.float())(X).values, expected, rtol=1e-6, atol=0
    )
    texts = normal(B, 5, seed=2)
    each = FeatureSimilarity(net.features)(X, {"text_features": texts}).values
    torch.testing.assert_close(each, torch.nn.functional.cosine_similarity(features, texts))
    own = FeatureSimilarity(net.features)(X, {"text_features": features}).values
    assert own.tolist() == pytest.approx([1.0] * B)
    plain = FeatureSimilarity(lambda x: x.flatten(1)[:, :5], TEXT)  # any callable
    x = torch.cat((TEXT.reshape(1, 5), -TEXT.reshape(1, 5), torch.zeros(1, 5, dtype=torch.float64)))
    output = plain(x)
    assert output.values[:2].tolist() == pytest.approx([1.0, -1.0]) and output.valid.tolist() == [True, True, False]


def test_another_precision_and_sums() -> None:
    net = network().float().eval()
    parts: dict[str, Reward] = {
        "label": ClassifierLogProbability(net),
        "entropy": ClassEntropy(net),
        "text": FeatureSimilarity(net.features, TEXT),
    }
    total, gradient = WeightedSum(parts, {"label": 1.0, "entropy": 0.5, "text": 2.0}).value_and_grad(X, context())
    assert gradient.dtype == torch.float64 and total.values.dtype == torch.float32 and total.valid.all()
    expected = sum(w * part(X, context()).values for w, part in zip((1.0, 0.5, 2.0), parts.values(), strict=True))
    torch.testing.assert_close(total.values, expected)
    assert {"entropy/class_entropy", "label/accuracy"} <= set(total.logs)
    half = ClassifierLogProbability(network().bfloat16())(X.float(), context())
    assert half.values.dtype == torch.float32


NET = network()
REFUSED = {
    "target": (lambda: ClassifierLogProbability(NET, -1), "target=-1; expected a class"),
    "target beyond": (lambda: ClassifierLogProbability(NET, K)(X), "from 4 to 4, expected 0 to 3"),
    "null label": (lambda: ClassifierLogProbability(NET)(X, {"class_labels": LABELS + 1}), "0 to 3.*no class"),
    "float label": (lambda: ClassifierLogProbability(NET)(X, {"class_labels": LABELS.float()}), "expected integers"),
    "one hot": (lambda: ClassifierLogProbability(NET)(X, {"class_labels": torch.eye(B).long()}), "expected integers"),
    "no label": (lambda: ClassifierLogProbability(NET)(X, {"class_label": LABELS}), "Did you mean 'class_label'"),
    "no logits": (lambda: ClassifierLogProbability(nn.Flatten(0), 0)(X), r"expected logits \(6, K\)"),
    "parts": (lambda: ClassEntropy(lambda x: {"logits": x})(X), "type dict, expected a tensor"),
    "temperature": (lambda: ClassEntropy(NET, temperature=0.0), "temperature=0.0; expected a finite number above 0"),
    "a batch of one": (lambda: ClassEntropy(NET)(X[:1]), "a batch of 1 has the value 0 and the gradient 0.*at least 2"),
    "texts": (lambda: FeatureSimilarity(NET, normal(2, 5)), "one vector.*belongs in the context"),
    "text 0": (lambda: FeatureSimilarity(NET, torch.zeros(5)), "not 0"),
    "text size": (lambda: FeatureSimilarity(NET.features, TEXT[:4])(X), r"\(6, 5\), the text \(4,\)"),
    "text shape": (lambda: FeatureSimilarity(NET.features)(X, {"text_features": normal(B)}), r"the text \(6,\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_is_wrong(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        call()
