from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.linalg
import torch

from genkit.errors import ConfigError
from genkit.metrics import (
    class_diversity,
    frechet_distance,
    frechet_floor,
    hypervolume,
    hypervolume_difference,
    hypervolume_interval,
    precision_recall,
    radial_spectrum,
    spectrum_of_change,
)


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=source(seed), dtype=torch.float64)


def root_of(d: int, rank: int, seed: int) -> torch.Tensor:
    """A (d, rank) with the covariance A Aᵀ."""
    return normal(d, rank, seed=seed) / rank**0.5 + (torch.eye(d).double() if rank == d else 0.0)


def sample_with(mean: torch.Tensor, root: torch.Tensor, n: int, seed: int) -> torch.Tensor:
    """n rows whose sample mean is ``mean`` and whose sample covariance (n - 1) is root rootᵀ, to rounding."""
    z = normal(n, root.shape[1], seed=seed)
    z = z - z.mean(dim=0)
    white = torch.linalg.qr(z).Q * (n - 1) ** 0.5
    return white @ root.T + mean


def reference_distance(mean_a, cov_a, mean_b, cov_b) -> float:
    cross = np.trace(scipy.linalg.sqrtm(cov_a.numpy() @ cov_b.numpy())).real
    return float((mean_a - mean_b).square().sum() + cov_a.trace() + cov_b.trace()) - 2.0 * float(cross)


# ------------------------------------------------------------------------------------------------ Fréchet distance


def test_diagonal_covariances_have_the_closed_form():
    mean_a, mean_b = torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([0.0, 2.5, -1.0]).double()
    std_a, std_b = torch.tensor([1.0, 0.5, 2.0]).double(), torch.tensor([3.0, 0.5, 0.1]).double()
    a, b = sample_with(mean_a, std_a.diag(), 40, 1), sample_with(mean_b, std_b.diag(), 70, 2)
    expected = float((mean_a - mean_b).square().sum() + (std_a - std_b).square().sum())
    assert frechet_distance(a, b) == pytest.approx(expected, abs=1e-9)
    # control: neither the means nor the variances alone make up this number
    assert abs(expected - float((mean_a - mean_b).square().sum())) > 1.0
    assert abs(expected - float((std_a.square() - std_b.square()).square().sum())) > 1.0


def test_full_covariances_of_the_plane_have_the_closed_form():
    """tr M^½ = √(tr M + 2 √det M) for the 2×2 matrix M = C_a C_b."""
    root_a, root_b = root_of(2, 2, 3), root_of(2, 2, 4)
    cov_a, cov_b = root_a @ root_a.T, root_b @ root_b.T
    mean_a, mean_b = normal(2, seed=5), normal(2, seed=6)
    product = cov_a @ cov_b
    cross = float((product.trace() + 2.0 * product.det().sqrt()).sqrt())
    expected = float((mean_a - mean_b).square().sum() + cov_a.trace() + cov_b.trace()) - 2.0 * cross
    value = frechet_distance(sample_with(mean_a, root_a, 30, 7), sample_with(mean_b, root_b, 50, 8))
    assert value == pytest.approx(expected, abs=1e-9)
    # control: the covariances do not commute, so the trace of the product of the roots is another number
    roots = [torch.from_numpy(scipy.linalg.sqrtm(c.numpy()).real) for c in (cov_a, cov_b)]
    assert abs(float((roots[0] @ roots[1]).trace()) - cross) > 1e-3


@pytest.mark.parametrize("d", [1, 3, 8])
def test_agrees_with_the_matrix_square_root(d):
    a = normal(60, d, seed=d) @ root_of(d, d, d + 1) + 1.0
    b = normal(90, d, seed=d + 2) @ root_of(d, d, d + 3)
    moments = [m for x in (a, b) for m in (x.mean(dim=0), torch.cov(x.T).reshape(d, d))]
    assert frechet_distance(a, b) == pytest.approx(reference_distance(*moments), abs=1e-9)


def test_symmetric_zero_with_itself_and_blind_to_rotation_shift_and_order():
    a, b = normal(50, 6, seed=1) @ root_of(6, 6, 2), normal(80, 6, seed=3) + 0.3
    value = frechet_distance(a, b)
    rotation = torch.linalg.qr(normal(6, 6, seed=4)).Q
    assert frechet_distance(b, a) == pytest.approx(value, abs=1e-10)
    assert frechet_distance(a @ rotation + 5.0, b @ rotation + 5.0) == pytest.approx(value, abs=1e-10)
    assert frechet_distance(a[torch.randperm(50, generator=source(5))], b) == pytest.approx(value, abs=1e-10)
    assert frechet_distance(3.0 * a, 3.0 * b) == pytest.approx(9.0 * value, rel=1e-10)
    assert frechet_distance(a + 2.0, a) == pytest.approx(24.0, abs=1e-10)
    assert 0.0 <= frechet_distance(a, a) < 1e-12
    assert frechet_distance(a.float(), b.float()) == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize(("n", "d"), [(2, 1), (5, 40), (40, 40), (41, 40)])
def test_fewer_rows_than_features_stay_exact(n, d):
    a = normal(n, d, seed=1)
    # the eigenvalues' square roots would leave about 1e-8 for each of the directions without variance
    assert 0.0 <= frechet_distance(a, a) < 1e-12 * d
    # the same rows in a space of more dimensions
    lift = torch.linalg.qr(normal(60, d, seed=2)).Q.T
    b = normal(n + 3, d, seed=3)
    assert frechet_distance(a @ lift, b @ lift) == pytest.approx(frechet_distance(a, b), abs=1e-10)


def test_singular_covariances_are_the_limit_of_regular_ones():
    d, mean = 5, torch.zeros(5).double()
    root_a, root_b = root_of(d, 2, 1), root_of(d, 3, 2)
    value = frechet_distance(sample_with(mean, root_a, 30, 3), sample_with(mean, root_b, 30, 4))
    gaps = []
    for noise in (1e-2, 1e-4, 1e-6):
        cov_a, cov_b = (r @ r.T + noise * torch.eye(d).double() for r in (root_a, root_b))
        gaps.append(abs(reference_distance(mean, cov_a, mean, cov_b) - value))
    assert gaps[0] > gaps[1] > gaps[2] and gaps[2] < 1e-2
    # orthogonal supports: nothing crosses, both traces remain
    left, right = torch.eye(4).double()[:, :2], torch.eye(4).double()[:, 2:]
    a, b = sample_with(mean[:4], left, 20, 5), sample_with(mean[:4], 2.0 * right, 20, 6)
    assert frechet_distance(a, b) == pytest.approx(2.0 + 8.0, abs=1e-9)


def test_the_floor_falls_like_one_over_n():
    features = normal(4000, 4) @ root_of(4, 4, 1)
    floors = [frechet_floor(features, n, generator=source(2), repeats=24) for n in (50, 200, 800)]
    for coarse, fine in itertools.pairwise(floors):
        assert 3.0 < coarse.mean / fine.mean < 5.4
    assert all(0.0 < f.std < f.mean for f in floors) and [f.n for f in floors] == [50, 200, 800]


def test_a_perfect_model_is_at_the_floor_and_a_shifted_one_above():
    reference, n = normal(2000, 4, seed=1), 250
    floor = frechet_floor(reference, n, generator=source(2), repeats=16)
    model = normal(8 * n, 4, seed=3).split(n)
    scores = torch.tensor([frechet_distance(m, reference[i * n : (i + 1) * n]) for i, m in enumerate(model)])
    assert abs(float(scores.mean()) - floor.mean) < 2.0 * floor.std
    shifted = frechet_distance(model[0] + 0.25, reference[:n])
    assert shifted > floor.mean + 5.0 * floor.std
    # at another n the same model seems to beat the floor: the reason to hold n equal
    assert frechet_distance(torch.cat(model), reference) < 0.5 * floor.mean


def test_the_floor_repeats_with_its_generator_and_leaves_the_global_one_alone():
    features, state = normal(64, 3), torch.get_rng_state()
    first, again = (frechet_floor(features, 32, generator=source(1)) for _ in range(2))
    assert first == again != frechet_floor(features, 32, generator=source(2))
    assert torch.equal(state, torch.get_rng_state()) and first.repeats == 8
    assert math.isnan(frechet_floor(features, 5, generator=source(), repeats=1).std)
    # two rows a half out of four: three divisions exist, and no half shares a row with the other
    points = torch.tensor([[0.0], [1.0], [10.0], [100.0]])
    pairs = [frechet_distance(points[[0, i]], points[[j for j in (1, 2, 3) if j != i]]) for i in (1, 2, 3)]
    for seed in range(6):
        value = frechet_floor(points, 2, generator=source(seed), repeats=1).mean
        assert min(abs(value - pair) for pair in pairs) < 1e-9


# --------------------------------------------------------------------------------------------- precision and recall


def by_definition(real: np.ndarray, fake: np.ndarray, k: int) -> tuple[float, float, float, float]:
    def radius(points):
        return [sorted(math.dist(p, q) for j, q in enumerate(points) if j != i)[k - 1] for i, p in enumerate(points)]

    real_radius, fake_radius = radius(real), radius(fake)
    balls = [[math.dist(r, f) <= real_radius[i] for i, r in enumerate(real)] for f in fake]
    precision = sum(any(row) for row in balls) / len(fake)
    recall = sum(any(math.dist(r, f) <= fake_radius[j] for j, f in enumerate(fake)) for r in real) / len(real)
    density = sum(sum(row) for row in balls) / (k * len(fake))
    coverage = sum(any(row[i] for row in balls) for i in range(len(real))) / len(real)
    return precision, recall, density, coverage


def numbers(result) -> tuple[float, float, float, float]:
    return result.precision, result.recall, result.density, result.coverage


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_agrees_with_the_definition(k, dtype):
    for seed in range(6):
        # a grid: many equal distances and copies of points, exact in both precisions
        real = torch.randint(0, 6, (14, 2), generator=source(seed)).to(dtype)
        fake = torch.randint(2, 9, (9, 2), generator=source(seed + 50)).to(dtype)
        expected = by_definition(real.tolist(), fake.tolist(), k)
        for chunk in (1, 4, 1024):
            result = precision_recall(real, fake, k, chunk)
            assert numbers(result) == pytest.approx(expected, abs=1e-12)
        assert (result.k, result.num_real, result.num_fake) == (k, 14, 9)


def test_values_of_a_line_by_hand():
    """Real 0, 1, 3 have the radii 1, 1, 2; fake 0.5, 4, 9 have 3.5, 3.5, 5."""
    result = precision_recall(torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([[0.5], [4.0], [9.0]]), k=1)
    # 0.5 is in the balls of 0 and 1, and not in [1, 5]; 4 in that of 3; 9 in none
    assert numbers(result) == pytest.approx((2 / 3, 1.0, 3 / 3, 1.0))


def test_identical_sets_and_far_sets():
    real = normal(100, 5)
    for k in (1, 3):
        # each point lies in its own ball and, by closed balls, in those of which it is one of the k neighbours
        assert numbers(precision_recall(real, real.clone(), k)) == (1.0, 1.0, pytest.approx((k + 1) / k), 1.0)
        assert numbers(precision_recall(real, real + 1000.0, k)) == (0.0, 0.0, 0.0, 0.0)


def test_a_lost_mode_costs_recall_and_a_spurious_one_precision():
    def cloud(n, centre, seed):
        return normal(n, 2, seed=seed) + torch.tensor(centre)

    left, right, nowhere = (0.0, 0.0), (50.0, 0.0), (0.0, 50.0)
    real = torch.cat((cloud(200, left, 1), cloud(200, right, 2)))
    good = precision_recall(real, torch.cat((cloud(200, left, 3), cloud(200, right, 4))))
    lost = precision_recall(real, cloud(400, left, 3))
    spurious = precision_recall(real, torch.cat((cloud(150, left, 3), cloud(150, right, 4), cloud(100, nowhere, 5))))
    assert min(good.precision, good.recall, good.coverage) > 0.9 and abs(good.density - 1.0) < 0.15
    assert abs(lost.precision - good.precision) < 0.05
    assert lost.recall < 0.51 and lost.coverage < 0.51
    assert abs(spurious.recall - good.recall) < 0.05 and abs(spurious.coverage - good.coverage) < 0.08
    assert spurious.precision == pytest.approx(0.75 * good.precision, abs=0.05)
    assert spurious.density == pytest.approx(0.75 * good.density, abs=0.1)


def test_an_outlier_fools_precision_and_recall_but_not_density_and_coverage():
    real, fake = normal(200, 2, seed=1), normal(200, 2, seed=2) + 20.0
    assert numbers(precision_recall(real, fake)) == (0.0, 0.0, 0.0, 0.0)
    real_outlier = precision_recall(torch.cat((real, torch.tensor([[40.0, 40.0]]))), fake)
    assert real_outlier.precision == 1.0 and real_outlier.density < 0.4
    fake_outlier = precision_recall(real, torch.cat((fake, torch.tensor([[-20.0, -20.0]]))))
    assert fake_outlier.recall == 1.0 and fake_outlier.coverage == 0.0


def test_distances_do_not_cancel_far_from_the_origin():
    real, fake = (normal(120, 4, seed=s).float() + 4096.0 for s in (1, 2))
    assert precision_recall(real, fake) == precision_recall(real.double(), fake.double())
    # control: products of norms in the same precision find other distances
    exact, products = (torch.cdist(real, fake, compute_mode=f"{m}use_mm_for_euclid_dist") for m in ("donot_", ""))
    assert float((exact - products).abs().max()) > 0.1


# ------------------------------------------------------------------------------------------------------- diversity


def test_class_diversity_by_hand():
    images = torch.tensor([[[0.0, 1.0]], [[2.0, 1.0]], [[5.0, 5.0]], [[7.0, 9.0]], [[9.0, 13.0]], [[100.0, -100.0]]])
    result = class_diversity(images, torch.tensor([4, 4, 1, 1, 1, 8]))
    # class 1: deviations 2 and 4; class 4: √2 and 0; class 8 has one image
    assert result.classes.tolist() == [1, 4] and result.left_out == 1
    assert result.per_class.tolist() == pytest.approx([3.0, 2.0**0.5 / 2.0])
    assert result.mean == pytest.approx((3.0 + 2.0**0.5 / 2.0) / 2.0)
    # neither shifts nor the order of the images matter, copies of one image have none
    order = torch.tensor([5, 2, 0, 4, 3, 1])
    moved = class_diversity(images[order] + 7.0, torch.tensor([4, 4, 1, 1, 1, 8])[order])
    assert moved.mean == pytest.approx(result.mean)
    assert class_diversity(images[:1].expand(5, 1, 2), torch.zeros(5, dtype=torch.int32)).mean == 0.0


def test_class_diversity_does_not_count_the_distance_of_the_classes():
    noise, labels = 0.5 * normal(4000, 1, 3, 3), torch.arange(4000) % 4
    result = class_diversity(noise + 10.0 * labels.view(-1, 1, 1, 1), labels)
    assert result.mean == pytest.approx(0.5, rel=0.02)
    assert float((noise + 10.0 * labels.view(-1, 1, 1, 1)).std(dim=0).mean()) > 10.0


# --------------------------------------------------------------------------------------------------------- spectra

SIZES = [(8, 8), (7, 7), (8, 12), (9, 6), (5, 16), (1, 10), (1, 1)]


@pytest.mark.parametrize("size", SIZES)
def test_power_sums_to_the_mean_square(size):
    images = normal(6, 3, *size) + 0.7
    spectrum = radial_spectrum(images)
    assert float(spectrum.power.sum()) == pytest.approx(float(images.square().mean()), rel=1e-12)
    assert int(spectrum.coefficients.sum()) == size[0] * size[1] and int(spectrum.coefficients.min()) > 0
    assert spectrum.frequencies.tolist() == list(range(len(spectrum.power)))
    # bin 0 is the mean alone
    means = images.mean(dim=(2, 3))
    assert float(spectrum.power[0]) == pytest.approx(float(means.square().mean()), rel=1e-10)


@pytest.mark.parametrize("size", [(4, 4), (3, 5), (6, 4)])
def test_equals_the_sum_over_waves(size):
    height, width = size
    image, side = normal(1, 1, height, width), max(size)
    expected: dict[int, float] = {}
    for ky, kx in itertools.product(range(height), range(width)):
        wave = sum(
            float(image[0, 0, y, x]) * np.exp(-2j * np.pi * (ky * y / height + kx * x / width))
            for y, x in itertools.product(range(height), range(width))
        )
        fy, fx = min(ky, height - ky) / height, min(kx, width - kx) / width
        k = math.floor(side * math.hypot(fy, fx) + 0.5)
        expected[k] = expected.get(k, 0.0) + abs(wave / (height * width)) ** 2
    assert radial_spectrum(image).power.tolist() == pytest.approx([expected[k] for k in sorted(expected)])


@pytest.mark.parametrize(("size", "along", "k", "frequency"), [
    ((16, 16), 1, 3, 3), ((15, 15), 0, 7, 7), ((16, 16), 0, 8, 8), ((8, 24), 1, 5, 5), ((8, 24), 0, 2, 6),
    ((24, 8), 1, 2, 6), ((9, 12), 0, 3, 4),
])  # fmt: skip
def test_a_cosine_lands_in_its_bin(size, along, k, frequency):
    """k waves along a side are k times longer/own cycles per longer side."""
    phase = 2.0 * math.pi * k * torch.arange(size[along]).double() / size[along]
    wave = phase.cos().view(-1, 1) if along == 0 else phase.cos().view(1, -1)
    spectrum = radial_spectrum((3.0 * wave).expand(2, 1, *size))
    power = 9.0 if 2 * k == size[along] else 4.5
    assert float(spectrum.power[frequency]) == pytest.approx(power, rel=1e-12)
    assert float(spectrum.power.sum()) == pytest.approx(power, rel=1e-12)


def test_white_noise_is_flat_and_a_rotated_image_has_the_same_spectrum():
    images = normal(600, 1, 12, 12)  # more than are transformed at once
    spectrum = radial_spectrum(images)
    flat = spectrum.power / spectrum.coefficients * 144.0
    assert float((flat - 1.0).abs().max()) < 0.15
    rotated = radial_spectrum(images.rot90(dims=(2, 3)))
    assert torch.allclose(rotated.power, spectrum.power, rtol=1e-12)
    assert torch.allclose(radial_spectrum(images.float()).power, spectrum.power, rtol=1e-5)


@pytest.mark.parametrize("size", [(16, 16), (15, 15), (12, 20)])
def test_smooth_changes_are_low_and_sharp_ones_high(size):
    before = normal(5, 2, *size)
    change = normal(5, 2, *size, seed=1)
    rows, columns = (torch.fft.fftfreq(n, dtype=torch.float64).abs() for n in size)
    # a cut between the two: half of Nyquist is a quarter cycle a pixel
    low_pass = torch.hypot(rows.unsqueeze(1), columns.unsqueeze(0)) <= 0.25
    low = torch.fft.ifft2(torch.fft.fft2(change) * low_pass).real
    for part, share in ((low, 0.0), (change - low, 1.0)):
        result = spectrum_of_change(before, before + part)
        assert result.high_frequency_share == pytest.approx(share, abs=1e-10)
        assert float(result.shares.sum()) == pytest.approx(1.0, abs=1e-12)
        assert result.mean_squared_change == pytest.approx(float(part.square().mean()), rel=1e-10)
    mixed = spectrum_of_change(before, before + change)
    assert mixed.high_frequency_share == pytest.approx(float((~low_pass).double().mean()), abs=0.05)
    checkers = (-1.0) ** (torch.arange(size[0]).view(-1, 1) + torch.arange(size[1]))
    assert spectrum_of_change(before, before + checkers).high_frequency_share > 0.95
    assert spectrum_of_change(before, before + 1.0).shares[0] == pytest.approx(1.0)


def test_shares_ignore_the_size_and_sign_of_a_change_and_none_has_no_shares():
    before, change = normal(3, 1, 8, 8), normal(3, 1, 8, 8, seed=1)
    one, other = spectrum_of_change(before, before + change), spectrum_of_change(before, before - 0.1 * change)
    assert torch.allclose(one.shares, other.shares, rtol=1e-10)
    assert other.mean_squared_change == pytest.approx(0.01 * one.mean_squared_change)
    none = spectrum_of_change(before, before.clone())
    assert none.mean_squared_change == 0.0 and bool(none.shares.isnan().all()) and math.isnan(none.high_frequency_share)


# --------------------------------------------------------------------------------------------------------- volumes

TWO = [torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, 1.0], [1.0, 1.0]])]  # volumes 2 and 4 above (0, 0)


def test_the_interval_of_two_seeds_by_hand():
    """The mean of two draws is 2, 3 or 4 with the chances 1/4, 1/2, 1/4."""
    result = hypervolume_interval(TWO, [0.0, 0.0], generator=source())
    assert (result.value, result.low, result.high) == (3.0, 2.0, 4.0)
    alone = hypervolume_interval(TWO[:1], [0.0, 0.0], generator=source())
    assert (alone.value, alone.low, alone.high) == (2.0, 2.0, 2.0)


def test_the_interval_approaches_that_of_the_normal_law():
    points = [torch.rand(5, 3, generator=source(seed), dtype=torch.float64) for seed in range(60)]
    result = hypervolume_interval(points, [0.0] * 3, 2000, generator=source(1))
    volumes = torch.tensor([hypervolume(p, [0.0] * 3) for p in points], dtype=torch.float64)
    error = float(volumes.std()) / 60**0.5
    assert result.value == pytest.approx(float(volumes.mean()))
    assert result.low == pytest.approx(result.value - 1.96 * error, abs=0.2 * error)
    assert result.high == pytest.approx(result.value + 1.96 * error, abs=0.2 * error)
    assert result == hypervolume_interval(points, [0.0] * 3, 2000, generator=source(1))


def test_a_paired_difference_sees_what_two_intervals_hide():
    worse = [points - torch.tensor([0.0, 0.25 / float(points[0, 0])]) for points in TWO]  # each volume less 1/4
    zero = hypervolume_difference(TWO, TWO, [0.0, 0.0], generator=source())
    assert (zero.value, zero.low, zero.high) == (0.0, 0.0, 0.0)
    paired = hypervolume_difference(TWO, worse, [0.0, 0.0], generator=source())
    assert (paired.value, paired.low, paired.high) == pytest.approx((0.25, 0.25, 0.25))
    apart = hypervolume_interval(worse, [0.0, 0.0], generator=source())
    assert apart.high > 2.0  # the intervals of the two means overlap
    swapped = hypervolume_difference(TWO, worse[::-1], [0.0, 0.0], generator=source())
    assert swapped.value == pytest.approx(0.25) and swapped.low < 0.0 < swapped.high


# -------------------------------------------------------------------------------------------------------- refusals

ROWS, HOLE = torch.zeros(5, 2), torch.tensor([[0.0, 1.0], [math.nan, 0.0], [2.0, math.inf]])
IMAGES = torch.zeros(4, 1, 3, 3)


@pytest.mark.parametrize(("call", "match"), [
    (lambda: frechet_distance(ROWS[:1], ROWS), r"features_a has shape \(1, 2\); .* n >= 2"),
    (lambda: frechet_distance(ROWS, ROWS[0]), r"features_b has shape \(2,\)"),
    (lambda: frechet_distance(ROWS, HOLE), "2 of 3 rows of features_b are NaN or infinite"),
    (lambda: frechet_distance(ROWS, torch.zeros(5, 3)), r"\(5, 2\) and features_b shape \(5, 3\); expected the same d"),
    (lambda: frechet_distance([[0.0]], ROWS), "features_a has type list"),
    (lambda: frechet_floor(ROWS, 3, generator=source()), "n=3 with 5 rows; .* n <= 2"),
    (lambda: frechet_floor(ROWS, 1, generator=source()), "n=1; expected an integer, at least 2"),
    (lambda: frechet_floor(ROWS, 2, generator=None), "generator=None; expected torch.Generator"),
    (lambda: frechet_floor(ROWS, 2, generator=source(), repeats=0), "repeats=0"),
    (lambda: frechet_floor(HOLE, 2, generator=source()), "2 of 3 rows of features are NaN"),
    (lambda: precision_recall(ROWS, ROWS[:3], k=3), "k=3 with 5 real and 3 fake rows"),
    (lambda: precision_recall(ROWS[:1], ROWS, k=1), "k=1 with 1 real and 5 fake rows"),
    (lambda: precision_recall(ROWS, ROWS, k=0), "k=0; expected a positive integer"),
    (lambda: precision_recall(ROWS, ROWS, chunk=0), "chunk=0"),
    (lambda: precision_recall(HOLE, ROWS), "2 of 3 rows of real are NaN"),
    (lambda: precision_recall(ROWS, torch.zeros(5, 1)), "expected the same d"),
    (lambda: class_diversity(IMAGES, torch.zeros(4)), r"labels has shape \(4,\), torch.float32; expected integers"),
    (lambda: class_diversity(IMAGES, torch.arange(3)), r"labels has shape \(3,\)"),
    (lambda: class_diversity(IMAGES, torch.arange(4)), "each of the 4 labels has one image"),
    (lambda: class_diversity(HOLE, torch.zeros(3).long()), "2 of 3 rows of images are NaN"),
    (lambda: class_diversity(torch.zeros(4), torch.zeros(4).long()), r"expected a tensor \(n, \*\)"),
    (lambda: radial_spectrum(IMAGES[0]), r"images has shape \(1, 3, 3\); expected a tensor \(n, C, H, W\)"),
    (lambda: radial_spectrum(IMAGES[:0]), r"images has shape \(0, 1, 3, 3\)"),
    (lambda: radial_spectrum(IMAGES + math.nan), "4 of 4 rows of images"),
    (lambda: spectrum_of_change(IMAGES, IMAGES[:2]), r"after has shape \(2, 1, 3, 3\)"),
    (lambda: spectrum_of_change(IMAGES, IMAGES + math.inf), "4 of 4 rows of after"),
    (lambda: hypervolume_interval([], [0.0], generator=source()), "0 seeds"),
    (lambda: hypervolume_interval(TWO, [0.0], generator=source()), "reference"),
    (lambda: hypervolume_interval(TWO, [0.0, 0.0], 1, generator=source()), "num_resamples=1"),
    (lambda: hypervolume_interval(TWO, [0.0, 0.0], generator=3), "generator=3; expected"),
    (lambda: hypervolume_difference(TWO, TWO[:1], [0.0, 0.0], generator=source()), "has 2 seeds and b_by_seed 1"),
])  # fmt: skip
def test_refusals_name_what_is_wrong(call, match):
    with pytest.raises(ConfigError, match=match):
        call()
