from __future__ import annotations

import pytest
import torch

from genkit.data.mixtures import StableMixture
from genkit.metrics.modes import mode_coverage

CENTRES = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
WEIGHTS = torch.tensor([0.5, 0.3, 0.2])


def test_counts_of_a_constructed_sample():
    sample = torch.cat(
        (CENTRES[0].expand(6, 2), CENTRES[1].expand(3, 2), CENTRES[2].expand(1, 2), torch.full((10, 2), 5.0))
    )
    result = mode_coverage(sample, CENTRES, WEIGHTS, radius=1.0)
    assert result.in_mode_mass == 0.5
    assert torch.allclose(result.proportions, torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64))
    assert result.total_variation == pytest.approx(0.1)
    assert result.min_ratio == pytest.approx(0.5) and result.captured == 3
    assert mode_coverage(sample, CENTRES, WEIGHTS, radius=1.0, capture_share=0.6).captured == 2


def test_a_lost_mode_is_seen_and_a_permutation_of_labels_is_not_a_match():
    sample = torch.cat((CENTRES[0].expand(5, 2), CENTRES[1].expand(3, 2)))
    lost = mode_coverage(sample, CENTRES, WEIGHTS, radius=1.0)
    assert (lost.captured, lost.min_ratio) == (2, 0.0) and lost.total_variation == pytest.approx(0.2)
    swapped = mode_coverage(sample, CENTRES[[1, 0, 2]], WEIGHTS, radius=1.0)
    assert swapped.total_variation > lost.total_variation


def test_no_sample_in_any_mode():
    result = mode_coverage(torch.full((4, 2), 50.0), CENTRES, WEIGHTS, radius=1.0)
    assert (result.in_mode_mass, result.total_variation, result.captured) == (0.0, 1.0, 0)


def test_data_of_the_mixture_covers_itself():
    data = StableMixture(40_000)
    result = mode_coverage(data.sample, data.centres, data.weights, radius=0.3)
    assert result.captured == 9 and result.total_variation < 0.03
    # a neighbour's tail adds a little to what the sample's own mode holds
    own = 1 - float(data.noise_radius_sf(torch.tensor(0.3)))
    assert own - 0.01 < result.in_mode_mass < own + 0.03


def test_nonfinite_rows_are_counted():
    sample = torch.cat((CENTRES, torch.tensor([[torch.nan, 0.0], [0.0, torch.inf]])))
    with pytest.warns(UserWarning, match="2 of 5 samples"):
        assert mode_coverage(sample, CENTRES, WEIGHTS, radius=1.0).nonfinite == 2


def test_mismatched_shapes_are_named():
    with pytest.raises(ValueError, match=r"centres \(K, d\)"):
        mode_coverage(torch.zeros(4, 3), CENTRES, WEIGHTS, radius=1.0)
