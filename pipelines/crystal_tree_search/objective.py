"""The training of the small base model: one time for all fields of a crystal, one loss a field.

Differs from the paper in: everything here; only the paper's abstract is public, and it uses pretrained base models.
Losses follow MatterGen (arXiv 2312.03687) and DiffCSP (arXiv 2309.04475), in continuous time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from genkit._checks import checked_number
from genkit.errors import ConfigError, nearest
from genkit.pipelines.crystal_tree_search.model import CrystalTransformer, without_drift
from genkit.pipelines.crystal_tree_search.state import CrystalCodec
from genkit.samplers.noise import Keys
from genkit.training.objective import LossOutput, Objective

__all__ = ["CONDITIONS", "CrystalDiffusionObjective"]

#: what the network may be told; 0 means: not told
CONDITIONS = ("space_group", "stability")
_FIELDS = ("lattice", "coordinates", "types")
#: smallest t that the weight 1/t of a masked type is taken at: below it few crystals would carry all of the gradient
_LEAST_TIME = 0.1


class CrystalDiffusionObjective(Objective):
    """E_{t, noise} Σ_field w_field · loss_field, with t uniform in [0, 1], for each crystal the mean over its atoms:

    * lattice: |f − v|²/6, v the prediction type's target (α ε − σ y);
    * coordinates: |f − (−σ_t ∇ log p(x_t|x_0))|²/3n. Since log σ_t is linear in t, this weight is that of the
      likelihood: the KL of the chain is ∫ |σ Δscore|² d log σ. The target's mean over the atoms is taken out, since no
      function of relative positions can know it;
    * types, masked with probability t^p (p the field's power of :class:`~genkit.schedulers.ProductScheduler`):
      −log p(type) · 1[masked] p/max(t, 0.1), the likelihood's weight, bounded. Noisy one-hot: |f − v|²/K.

    With probability ``drop_conditions`` a crystal is told none of its conditions (for guidance), with probability
    ``given_types`` its types are clean and add no loss (for search at a fixed composition).

    Args:
        denoiser: the network, of the codec's family.
        codec: what makes states of physical crystals.
        weights: field → w; missing ones are 1.
        drop_conditions: probability of dropping all conditions of a crystal at once.
        given_types: probability that a crystal's types are given.

    Raises:
        ConfigError: a network and codec that do not fit, or an option of another type or range.

    The data's batches are physical crystals (see :mod:`genkit.pipelines.crystal_tree_search.state`), with
    ``space_group`` and ``stability`` int64 (B,) where there are any.
    """

    def __init__(
        self,
        denoiser: CrystalTransformer,
        codec: CrystalCodec,
        weights: Mapping[str, float] | None = None,
        drop_conditions: float = 0.2,
        given_types: float = 0.1,
    ) -> None:
        _check_fits(denoiser, codec)
        for name in weights or {}:
            if name not in _FIELDS:
                raise ConfigError(f"weights names the field {name!r}, which has no loss.{nearest(name, _FIELDS)}")
        self.weights = dict.fromkeys(_FIELDS, 1.0) | {
            name: checked_number(f"weights[{name!r}]", w, "a number, at least 0", lambda v: v >= 0.0)
            for name, w in (weights or {}).items()
        }
        self.drop_conditions = _probability("drop_conditions", drop_conditions)
        self.given_types = _probability("given_types", given_types)
        self.denoiser, self.codec = denoiser, codec
        self.chain = codec.scheduler()

    def networks(self) -> Mapping[str, nn.Module]:
        return {"denoiser": self.denoiser}

    def loss(self, turn: str, batch: Mapping[str, Tensor], *, step: int, keys: Keys) -> LossOutput:
        clean = self.codec.encode(batch)
        t = keys.at(purpose="time").uniform().to(torch.float32)
        given = keys.at(purpose="given").uniform() < self.given_types
        noise = {name: self._draw(name, keys.at(purpose=f"noise/{name}"), clean) for name in _FIELDS}
        noisy = self._noisy(clean, noise, t, given)
        output = self.net("denoiser")(noisy, t, self._told(batch, keys.at(purpose="conditions")))
        parts = {
            "lattice": self._squared("lattice", output, clean, noise, t).mean(),
            "coordinates": self._of_coordinates(output["coordinates"], clean, noise["coordinates"], t),
            "types": (self._of_types(output, clean, noisy, noise, t) * ~given).mean(),
        }
        total = torch.stack([self.weights[name] * part for name, part in parts.items()]).sum()
        return LossOutput(total, {name: part.detach() for name, part in parts.items()})

    def _draw(self, name: str, keys: Keys, clean: Mapping[str, Tensor]) -> Tensor:
        """Unit noise of a field; for masked types a uniform number an atom."""
        if name == "types" and self.denoiser.masked:
            return keys.uniform(clean[name].shape[1:])
        return keys.normal(clean[name].shape[1:])

    def _noisy(
        self, clean: Mapping[str, Tensor], noise: Mapping[str, Tensor], t: Tensor, given: Tensor
    ) -> dict[str, Tensor]:
        noisy = dict(clean)
        for name, scheduler in self.chain.schedulers.items():
            if name == "types" and self.denoiser.masked:
                noisy[name] = scheduler.mask_tokens(clean[name], noise[name], self.chain.field_time(name, t))
            else:
                noisy[name] = scheduler.add_noise(clean[name], noise[name], self.chain.field_time(name, t))
        kept = given.reshape(-1, *[1] * (clean["types"].ndim - 1))
        return noisy | {"types": torch.where(kept, clean["types"], noisy["types"])}

    def _told(self, batch: Mapping[str, Tensor], keys: Keys) -> dict[str, Tensor]:
        dropped = keys.uniform() < self.drop_conditions
        return {name: torch.where(dropped, 0, batch[name]) for name in CONDITIONS if name in batch}

    # ---- the losses, one number a crystal -----------------------------------------------------------------------

    def _target(self, name: str, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        target: Tensor = self.chain.schedulers[name].target(clean, noise, self.chain.field_time(name, t))
        return target

    def _squared(
        self, name: str, output: Mapping[str, Tensor], clean: Mapping[str, Tensor], noise: Mapping[str, Any], t: Tensor
    ) -> Tensor:
        """Mean squared error over the last dimension, (B,) or (B, N)."""
        target = self._target(name, clean[name], noise[name], t)
        return (output[name] - target).square().mean(dim=-1)

    def _of_coordinates(self, output: Tensor, clean: Mapping[str, Tensor], noise: Tensor, t: Tensor) -> Tensor:
        target = self._target("coordinates", clean["coordinates"], noise, t)
        error = output - without_drift(target, clean["mask"])
        return _mean_over_atoms(error.square().mean(dim=-1), clean["mask"]).mean()

    def _of_types(
        self,
        output: Mapping[str, Tensor],
        clean: Mapping[str, Tensor],
        noisy: Mapping[str, Tensor],
        noise: Mapping[str, Tensor],
        t: Tensor,
    ) -> Tensor:
        mask = clean["mask"]
        if not self.denoiser.masked:
            return _mean_over_atoms(self._squared("types", output, clean, noise, t), mask)
        known = torch.arange(self.codec.mask_id + 1, device=t.device) != self.codec.mask_id
        log_probs = torch.where(known, output["types"], -torch.inf).log_softmax(dim=-1)
        target = torch.where(mask, clean["types"], 0)
        surprise = -log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        hidden = (noisy["types"] == self.codec.mask_id) & mask
        surprise = torch.where(hidden, surprise, 0.0)
        return _mean_over_atoms(surprise, mask) * self.chain.powers.get("types", 1.0) / t.clamp(min=_LEAST_TIME)


def _mean_over_atoms(values: Tensor, mask: Tensor) -> Tensor:
    """(B, N) → (B,), the mean over the real atoms."""
    return (values * mask).sum(dim=1) / mask.sum(dim=1)


def _probability(name: str, value: float) -> float:
    return checked_number(name, value, "a probability, at least 0 and below 1", lambda v: 0.0 <= v < 1.0)


def _check_fits(denoiser: CrystalTransformer, codec: CrystalCodec) -> None:
    theirs, ours = denoiser.config, codec.config
    for name in ("family", "density", "lattice_std", "sigma_min", "sigma_max"):
        if theirs[name] != ours[name]:
            raise ConfigError(
                f"the denoiser was made with {name}={theirs[name]!r}, the codec with {ours[name]!r}; make it of the "
                "codec's configuration"
            )
    if theirs["num_elements"] != len(codec.elements):
        raise ConfigError(f"the denoiser has num_elements={theirs['num_elements']}; expected {len(codec.elements)}")
