"""Rewards that a frozen network judges: a class's probability, diversity over classes, similarity of features.

In every call the network is in evaluation mode and its parameters get no gradient; afterwards both are as before.
Gradients flow to the sample only. The sample is cast to the type of the network's parameters, and probabilities are
taken in float32 or finer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from genkit._checks import checked_count, checked_number, got
from genkit.errors import ConfigError
from genkit.models.features import frozen
from genkit.rewards.base import Context, Reward, RewardOutput, Sample, context_entry, field_of, reward_output

__all__ = ["ClassEntropy", "ClassifierLogProbability", "FeatureSimilarity"]


class ClassifierLogProbability(Reward):
    r"""r(x) = log p(y | x) of a classifier: in nats, −∞ to 0.

    ∂r/∂x = Σ_k (1[k = y] − p(k | x)) ∂l_k/∂x of its logits l. A classifier is sure of images it never saw, so a high
    value does not say that x looks like its training data.

    Logs: ``accuracy``, the share of the samples whose largest logit is that of y.

    Args:
        network: (B, \*) → logits (B, K).
        target: y, the same for all samples; None reads ``context[label]``, integers (B,).
        label: the entry of the context with the classes, 0 to K-1.
        field: the part of the sample that is judged, when it has parts.

    Raises:
        ConfigError: a target that is no integer; at a call, logits of another shape, or a class outside 0 … K-1.
    """

    differentiable = True

    def __init__(
        self, network: nn.Module, target: int | None = None, *, label: str = "class_labels", field: str | None = None
    ) -> None:
        self.network, self.label, self.field = network, label, field
        self.target = None if target is None else checked_count("target", target, "a class, an integer >= 0", 0)

    def values(self, sample: Sample, context: Context | None) -> RewardOutput:
        logits = _logits(self, self.network, field_of(sample, self.field, of=self))
        y = self._classes(logits, context)
        found = F.log_softmax(logits, dim=1).gather(1, y.unsqueeze(1)).squeeze(1)
        right = (logits.detach().argmax(dim=1) == y).to(found.dtype)
        return reward_output(found, logs={"accuracy": right.mean()})

    def _classes(self, logits: Tensor, context: Context | None) -> Tensor:
        size, count = logits.shape
        if self.target is not None:
            y = torch.full((size,), self.target, device=logits.device)
        else:
            y = context_entry(context, self.label, size, of=self).to(logits.device)
        if y.is_floating_point() or y.shape != (size,):
            raise ConfigError(f"{self}: classes have {got(y)}, {y.dtype}; expected integers ({size},)")
        if size and not 0 <= int(y.min()) <= int(y.max()) < count:
            raise ConfigError(
                f"{self}: classes from {int(y.min())} to {int(y.max())}, expected 0 to {count - 1}: the network has "
                f"{count} (the label that stands for no class cannot be judged)"
            )
        return y.long()

    def __repr__(self) -> str:
        where = f"label={self.label!r}" if self.target is None else f"target={self.target}"
        return f"ClassifierLogProbability({where})"


class ClassEntropy(Reward):
    r"""r_b = Σ_y p(y | x_b) (log p(y | x_b) − log p̄(y)), p̄ = mean_b p(· | x_b): high where each image is of a clear
    class and the batch is of many.

    The mean over the batch is H(p̄) − mean_b H(p(· | x_b)) = log IS, the logarithm of the Inception score of this
    classifier, in nats, from 0 (all alike) to log min(B, K). Every r_b is a divergence, so none is below 0.

    Samples interact through p̄, and the gradient is that of the sum, F = Σ_b r_b. The part of it through p̄ is
    Σ_y (∂F/∂p̄_y) dp̄_y = −B Σ_y dp̄_y = 0, because probabilities sum to 1; so ∇F is the same with p̄ held fixed, and
    a shift of a logit counts by how rare its class is in the batch.

    Invalid samples (a logit is not finite) are left out of p̄ too. A batch of one has the value 0 and the gradient 0
    whatever the image is, so it is refused, and a single valid sample among others is invalid. The value grows with B:
    compare equal batch sizes, and count each micro-batch as a batch of its own.

    Logs: ``class_entropy``, H(p̄); ``sample_entropy``, mean_b H(p(· | x_b)); both in nats.

    Args:
        network: (B, \*) → logits (B, K).
        temperature: T > 0 of p = softmax(l/T); below 1 it sharpens an unsure classifier.
        field: the part of the sample that is judged, when it has parts.

    Raises:
        ConfigError: a temperature that is not above 0; at a call, a batch of one, or logits of another shape.

    Reference: Salimans et al., "Improved techniques for training GANs", arXiv:1606.03498, section 4.
    """

    differentiable = True

    def __init__(self, network: nn.Module, *, temperature: float = 1.0, field: str | None = None) -> None:
        self.network, self.field = network, field
        self.temperature = checked_number(
            "temperature", temperature, "a finite number above 0", lambda t: 0.0 < t < math.inf
        )

    def values(self, sample: Sample, context: Context | None) -> RewardOutput:
        x = field_of(sample, self.field, of=self)
        if len(x) < 2:
            raise ConfigError(
                f"{self}: a batch of {len(x)} has the value 0 and the gradient 0 whatever it holds; give at least 2 "
                "samples (a larger batch_size), so that there are classes to tell apart"
            )
        logits = _logits(self, self.network, x) / self.temperature
        finite = torch.isfinite(logits).all(dim=1)
        count = finite.sum()
        log_p = F.log_softmax(torch.where(finite.unsqueeze(1), logits, 0.0), dim=1)
        p = log_p.exp()
        weights = finite.to(p.dtype) / count.clamp(min=1)
        log_mean = _log_mean(log_p, weights)
        entropy = -(log_mean.exp() * log_mean).sum().detach()
        logs = {"class_entropy": entropy, "sample_entropy": -(weights @ (p * log_p).sum(dim=1)).detach()}
        return reward_output((p * (log_p - log_mean)).sum(dim=1), finite & (count > 1), logs)


def _log_mean(log_p: Tensor, weights: Tensor) -> Tensor:
    """log Σ_b w_b p_b, (K,), without underflow; rows of weight 0 are left out."""
    return torch.logsumexp(log_p + weights.log().unsqueeze(1), dim=0)


class FeatureSimilarity(Reward):
    r"""r(x) = ⟨f(x), e⟩ / (‖f(x)‖ ‖e‖): the cosine of an image's features and a text's, from −1 to 1.

    What a pair of encoders like CLIP's is used for; the text is encoded once and given as its features e.

    Args:
        image_encoder: (B, \*) → features (B, d): a module, a method of one (``network.features``), or any other
            callable, whose parameters and mode are then left as they are.
        text_features: e, (d,) for all samples, not 0; None reads ``context[label]``, (B, d).
        label: the entry of the context with the features.
        field: the part of the sample that is judged, when it has parts.

    Raises:
        ConfigError: features that are no vector, not finite or 0; at a call, shapes that do not fit.

    A sample whose features are 0 has no direction: it is invalid.
    """

    differentiable = True

    def __init__(
        self,
        image_encoder: nn.Module | Callable[[Tensor], Tensor],
        text_features: Tensor | None = None,
        *,
        label: str = "text_features",
        field: str | None = None,
    ) -> None:
        self.image_encoder, self.text_features = image_encoder, text_features
        self.label, self.field = label, field
        if text_features is None:
            return
        fits = isinstance(text_features, Tensor) and text_features.ndim == 1 and text_features.is_floating_point()
        if not fits or not bool(torch.isfinite(text_features).all()) or not bool(text_features.any()):
            raise ConfigError(
                f"FeatureSimilarity: text_features have {got(text_features)}; expected one vector (d,), floating "
                "point, finite and not 0. A text for each sample belongs in the context."
            )

    def values(self, sample: Sample, context: Context | None) -> Tensor:
        x = field_of(sample, self.field, of=self)
        features, text = _judged(self.image_encoder, x), self._text(x, context)
        expected = features.shape if self.text_features is None else features.shape[1:]
        if features.ndim != 2 or len(features) != len(x) or text.shape != expected:
            raise ConfigError(
                f"{self}: images have features {tuple(features.shape)}, the text {tuple(text.shape)}; expected "
                f"({len(x)}, d) and (d,), or ({len(x)}, d) in the context"
            )
        # not F.cosine_similarity, which calls the similarity of a vector of zeros 0
        text = text.to(features)
        unit = features / features.norm(dim=1, keepdim=True)
        return (unit * (text / text.norm(dim=-1, keepdim=True))).sum(dim=1)

    def _text(self, x: Tensor, context: Context | None) -> Tensor:
        if self.text_features is not None:
            return self.text_features
        return context_entry(context, self.label, len(x), of=self)


def _judged(judge: nn.Module | Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What a frozen judge says of ``x``, in float32 or finer; the graph leads to ``x`` alone."""
    owner = judge if isinstance(judge, nn.Module) else getattr(judge, "__self__", None)
    module = owner if isinstance(owner, nn.Module) else None
    first = None if module is None else next((p for p in module.parameters() if p.is_floating_point()), None)
    with nullcontext() if module is None else frozen(module):
        result = judge(x if first is None else x.to(first.dtype))
    if not isinstance(result, Tensor) or not result.is_floating_point():
        raise ConfigError(
            f"the network of a reward gave {got(result)}, expected a tensor (B, n), floating point; wrap a network "
            "whose output has parts"
        )
    return result.to(torch.promote_types(result.dtype, torch.float32))


def _logits(reward: Reward, network: nn.Module, x: Tensor) -> Tensor:
    logits = _judged(network, x)
    if logits.ndim != 2 or len(logits) != len(x) or logits.shape[1] < 2:
        raise ConfigError(f"{reward}: the network gave {got(logits)}; expected logits ({len(x)}, K), K >= 2")
    return logits
