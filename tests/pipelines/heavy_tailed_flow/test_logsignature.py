"""Log-signatures against closed forms, brute-force tensor algebra, other libraries, and invariances."""

from __future__ import annotations

import builtins
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from genkit.errors import ConfigError, MissingExtraError
from genkit.pipelines.heavy_tailed_flow.logsignature import clock_logsignature, logsignature, lyndon_words


def random_paths(batch: int, length: int, d: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, d, generator=generator, dtype=torch.float64).cumsum(1)


def coefficients(path: Tensor, depth: int) -> dict[str, float]:
    """Word (as digits) → coefficient, for one path (L, d)."""
    words = lyndon_words(path.shape[-1], depth)
    values = logsignature(path.unsqueeze(0), depth)[0].tolist()
    return {"".join(map(str, w)): v for w, v in zip(words, values, strict=True)}


class Series:
    """Truncated tensor series of one path as a dictionary word → coefficient: slow, plain, independent."""

    def __init__(self, terms: dict[tuple[int, ...], float], depth: int) -> None:
        self.terms, self.depth = terms, depth

    def __mul__(self, other: Series) -> Series:
        out: dict[tuple[int, ...], float] = {}
        for (u, a), (v, b) in itertools.product(self.terms.items(), other.terms.items()):
            if len(u) + len(v) <= self.depth:
                out[u + v] = out.get(u + v, 0.0) + a * b
        return Series(out, self.depth)

    @classmethod
    def signature(cls, path: Tensor, depth: int) -> Series:
        total, d = cls({(): 1.0}, depth), path.shape[1]
        for dx in path.diff(dim=0).tolist():
            words = itertools.chain.from_iterable(itertools.product(range(d), repeat=k) for k in range(depth + 1))
            exponential = {w: math.prod(dx[i] for i in w) / math.factorial(len(w)) for w in words}
            total = total * cls(exponential, depth)
        return total

    def log(self) -> Series:
        x = Series({w: c for w, c in self.terms.items() if w}, self.depth)
        power, out = Series({(): 1.0}, self.depth), {}
        for k in range(1, self.depth + 1):
            power = power * x
            for w, c in power.terms.items():
                out[w] = out.get(w, 0.0) + (-1) ** (k + 1) * c / k
        return Series(out, self.depth)

    def lyndon(self, d: int) -> list[float]:
        return [self.terms[w] for w in lyndon_words(d, self.depth)]


# ---- words ----------------------------------------------------------------------------------------------------------


def test_lyndon_words_are_ordered_and_counted_by_witts_formula() -> None:
    assert ["".join(map(str, w)) for w in lyndon_words(2, 5)] == (
        "0 1 01 001 011 0001 0011 0111 00001 00011 00101 00111 01011 01111".split()
    )
    for d, counts in ((2, (2, 1, 2, 3, 6, 9, 18, 30)), (3, (3, 3, 8, 18, 48)), (1, (1, 0, 0))):
        words = lyndon_words(d, len(counts))
        assert tuple(sum(len(w) == k for w in words) for k in range(1, len(counts) + 1)) == counts
        for w in words:  # smaller than all its proper suffixes, which defines a Lyndon word
            assert all(w < w[i:] for i in range(1, len(w)))


# ---- closed forms ---------------------------------------------------------------------------------------------------


def test_straight_line_has_level_one_only() -> None:
    line = torch.tensor([[[0.0, 0.0], [1.0, 2.0], [3.0, 6.0]]], dtype=torch.float64)
    torch.testing.assert_close(
        logsignature(line, 5)[0], torch.tensor([3.0, 6.0] + [0.0] * 12, dtype=torch.float64), rtol=0, atol=1e-13
    )


def test_corner_path_gives_the_baker_campbell_hausdorff_coefficients() -> None:
    corner = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    expected = [1, 1, 1 / 2, 1 / 12, 1 / 12, 0, 1 / 24, 0, -1 / 720, 1 / 180, -1 / 120, 1 / 180, -1 / 120, -1 / 720]
    np.testing.assert_allclose(list(coefficients(corner, 5).values()), expected, rtol=0, atol=1e-15)
    reversed_order = corner.flip(1)  # the other letter first: signs of 01 and 0011 flip, nothing else does
    flipped = [-v if w in ("01", "0011") else v for w, v in coefficients(corner, 5).items()]
    np.testing.assert_allclose(list(coefficients(reversed_order, 5).values()), flipped, rtol=0, atol=1e-15)


def test_a_single_jump_gives_bernoulli_polynomials_of_its_time() -> None:
    jump = torch.tensor([[0.0, 0.0], [0.25, 0.0], [0.25, 1.0], [1.0, 1.0]], dtype=torch.float64)
    c = coefficients(jump, 5)
    expected = {"1": 1, "01": -0.25, "001": -0.01041667, "011": 1 / 12, "0001": 0.0078125, "00001": 7.595e-5}
    for word, value in expected.items():
        assert c[word] == pytest.approx(value, abs=5e-9)


def bernoulli_moments(s: Tensor, values: Tensor) -> dict[str, float]:
    """∫ B_k(s)/k! dL over the cells of a grid on [0, 1], k = 1, 2, 3."""
    a, b, dl = s[:-1], s[1:], values.diff()
    m1, m2, m3 = (a + b) / 2, (a * a + a * b + b * b) / 3, (a**3 + a * a * b + a * b * b + b**3) / 4
    return {
        "1": float(dl.sum()),
        "01": float((dl * (m1 - 0.5)).sum()),
        "001": float((dl * (m2 - m1 + 1 / 6)).sum()) / 2,
        "0001": float((dl * (m3 - 1.5 * m2 + 0.5 * m1)).sum()) / 6,
    }


@pytest.mark.parametrize("seed", range(3))
def test_words_with_one_one_are_bernoulli_moments(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    s = torch.cat((torch.zeros(1), torch.rand(20, generator=generator).sort().values, torch.ones(1))).double()
    values = random_paths(1, 22, 1, seed)[0, :, 0]
    general = coefficients(torch.stack((s, values), dim=1), 4)
    fast = clock_logsignature(s, values.unsqueeze(0), 4)[0].tolist()
    for word, moment in bernoulli_moments(s, values).items():
        assert general[word] == pytest.approx(moment, abs=1e-12)
        assert fast[lyndon_words(2, 4).index(tuple(map(int, word)))] == pytest.approx(moment, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_words_011_and_0111_are_integrals_over_time(seed: int) -> None:
    """011 = ½ ∫ F² ds - J²/24 and 0111 = -1/6 ∫ (F³ - F J²/4) ds, here by Gauss quadrature in each cell."""
    s = torch.linspace(0, 1, 12, dtype=torch.float64)
    values = random_paths(1, 12, 1, seed)[0, :, 0]
    node, weight = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(3))
    f = values[:-1, None] + values.diff()[:, None] * (node + 1) / 2 - (values[0] + values[-1]) / 2
    measure = s.diff()[:, None] * weight / 2
    jump = values[-1] - values[0]
    c = coefficients(torch.stack((s, values), dim=1), 4)
    assert c["011"] == pytest.approx(float((f**2 * measure).sum() / 2 - jump**2 / 24), abs=1e-12)
    assert c["0111"] == pytest.approx(float(-((f**3 - f * jump**2 / 4) * measure).sum() / 6), abs=1e-12)


# ---- brute force and other libraries --------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "depth"), [(1, 3), (2, 1), (2, 5), (3, 4), (4, 3)])
def test_general_algorithm_equals_brute_force_tensor_algebra(d: int, depth: int) -> None:
    for path in random_paths(2, 5, d):
        exact = Series.signature(path, depth).log().lyndon(d)
        np.testing.assert_allclose(list(logsignature(path[None], depth)[0]), exact, rtol=1e-11, atol=1e-11)


def test_concatenation_is_chens_product() -> None:
    first, second = random_paths(2, 6, 2)
    joined = torch.cat((first, second[1:] - second[0] + first[-1]))
    product = Series.signature(first, 4) * Series.signature(second, 4)
    np.testing.assert_allclose(list(logsignature(joined[None], 4)[0]), product.log().lyndon(2), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("d", "depth"), [(2, 1), (2, 2), (2, 3), (2, 4), (2, 5), (3, 4)])
def test_equals_pysiglib(d: int, depth: int) -> None:
    pytest.importorskip("pysiglib")
    path = random_paths(8, 9, d)
    torch.testing.assert_close(
        logsignature(path, depth), logsignature(path, depth, backend="pysiglib"), rtol=1e-11, atol=1e-10
    )


@pytest.mark.parametrize(("d", "depth"), [(2, 4), (3, 2)])
def test_equals_iisignature_where_the_bases_agree(d: int, depth: int) -> None:
    iisignature = pytest.importorskip("iisignature")
    path = random_paths(4, 7, d)
    other = iisignature.logsig(path.numpy(), iisignature.prepare(d, depth))
    np.testing.assert_allclose(logsignature(path, depth).numpy(), other, rtol=1e-9, atol=1e-9)


def test_words_and_brackets_differ_from_depth_five_on() -> None:
    """The control: the other basis is equal to depth 4 and far off at depth 5, so the comparison can fail."""
    pysiglib = pytest.importorskip("pysiglib")
    from pysiglib import torch_api

    for depth in (4, 5):
        pysiglib.prepare_log_sig(2, depth, method=2)
    path = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.5, 2.0], [2.0, 0.5]]], dtype=torch.float64)
    brackets = [torch_api.log_sig(path, depth, method=2) for depth in (4, 5)]
    torch.testing.assert_close(brackets[0], logsignature(path, 4), rtol=0, atol=1e-13)
    difference = (brackets[1] - logsignature(path, 5)).abs()[0]
    assert float(difference.max()) > 0.07
    differing = {w for w, x in zip(lyndon_words(2, 5), difference.tolist(), strict=True) if x > 1e-9}
    assert differing == {(0, 0, 1, 0, 1), (0, 1, 0, 1, 1)}  # those that share their letters with another Lyndon word


# ---- the clock path -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [2, 3, 17, 65])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_clock_path_equals_the_general_algorithm(points: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(points)
    times = torch.rand(points, generator=generator, dtype=torch.float64).cumsum(0) - 3.0  # any span and origin
    if points > 3:
        times[2] = times[1]  # a jump: no time passes in this cell
    values = random_paths(5, points, 1)[..., 0] + 7.0
    general = logsignature(torch.stack((times.expand_as(values), values), dim=-1), depth)
    scale = general.abs().max()
    torch.testing.assert_close(clock_logsignature(times, values, depth) / scale, general / scale, rtol=0, atol=1e-12)


def test_clock_path_in_float32_is_as_accurate_as_the_walk() -> None:
    times = torch.linspace(0, 1, 65)
    values = torch.rand(64, 65, generator=torch.Generator().manual_seed(0)).cumsum(1).log1p()
    exact = clock_logsignature(times.double(), values.double(), 3)
    assert float((clock_logsignature(times, values, 3) - exact).abs().max()) < 2e-6


def test_clock_path_that_takes_no_time_and_one_point() -> None:
    values = torch.rand(3, 5, dtype=torch.float64)
    result = clock_logsignature(torch.zeros(5, dtype=torch.float64), values, 4)
    expected = torch.zeros_like(result)
    expected[:, 1] = values[:, -1] - values[:, 0]
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-15)
    assert torch.equal(clock_logsignature(torch.zeros(1), torch.rand(3, 1), 3), torch.zeros(3, 5))


# ---- invariances ----------------------------------------------------------------------------------------------------


def test_invariances_of_the_logsignature() -> None:
    path = random_paths(3, 8, 2)
    base = logsignature(path, 4)
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(logsignature(path.repeat_interleave(3, dim=1), 4), base, **close)  # repeated points
    halved = torch.stack((path[:, :-1], (path[:, :-1] + path[:, 1:]) / 2), dim=2).flatten(1, 2)
    torch.testing.assert_close(
        logsignature(torch.cat((halved, path[:, -1:]), 1), 4), base, **close
    )  # reparametrisation
    torch.testing.assert_close(logsignature(path + 100.0, 4), base, rtol=1e-8, atol=1e-8)  # translation
    torch.testing.assert_close(logsignature(path.flip(1), 4), -base, **close)  # time reversal
    ones = torch.tensor([sum(w) for w in lyndon_words(2, 4)], dtype=torch.float64)
    scaled = path * torch.tensor([1.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(logsignature(scaled, 4), base * 3.0**ones, **close)  # λ^(number of ones)


def test_time_reversal_is_no_invariance_of_the_signature_itself() -> None:
    """A control: a path that is not its own inverse changes under reversal, so the test above can fail."""
    path = random_paths(1, 8, 2)
    assert float((logsignature(path.flip(1), 4) - logsignature(path, 4)).abs().max()) > 0.1


@pytest.mark.parametrize("length", [1, 6])
def test_constant_paths_give_zeros(length: int) -> None:
    assert torch.equal(logsignature(torch.full((2, length, 3), 4.0), 3), torch.zeros(2, 14))


def test_empty_batch_half_precision_and_non_contiguous_input() -> None:
    assert logsignature(torch.zeros(0, 5, 2), 3).shape == (0, 5)
    assert clock_logsignature(torch.linspace(0, 1, 5), torch.zeros(0, 5), 3).shape == (0, 5)
    path = random_paths(4, 9, 2)
    half = logsignature(path.bfloat16(), 3)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, logsignature(path.bfloat16().float(), 3))
    turned = path.permute(1, 0, 2).contiguous().permute(1, 0, 2)
    torch.testing.assert_close(logsignature(turned, 3), logsignature(path, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast = clock_logsignature(torch.linspace(0, 1, 9), path[..., 0].float(), 3)
    torch.testing.assert_close(fast, clock_logsignature(torch.linspace(0, 1, 9), path[..., 0].float(), 3))


def test_a_nan_stays_in_its_row() -> None:
    path = random_paths(3, 6, 2)
    path[1, 2, 1] = math.nan
    times = torch.linspace(0, 1, 6, dtype=torch.float64)
    for result in (logsignature(path, 3), clock_logsignature(times, path[..., 1], 3)):
        assert torch.isfinite(result[[0, 2]]).all() and torch.isnan(result[1]).any()


# ---- derivatives ----------------------------------------------------------------------------------------------------


def test_gradients() -> None:
    path = random_paths(2, 4, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: logsignature(x, 4), path)
    assert torch.autograd.gradgradcheck(lambda x: logsignature(x, 3), path)
    times, values = torch.linspace(0, 1, 5, dtype=torch.float64), random_paths(2, 5, 1)[..., 0].requires_grad_()
    assert torch.autograd.gradcheck(lambda v: clock_logsignature(times, v, 4), values)


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: logsignature(torch.zeros(2, 3), 3), "shape"),
        (lambda: logsignature(torch.zeros(2, 0, 2), 3), "shape"),
        (lambda: logsignature(torch.zeros(2, 3, 2), 0), "depth is 0"),
        (lambda: logsignature(torch.zeros(2, 3, 2, dtype=torch.int64), 3), "floating-point"),
        (lambda: logsignature(torch.zeros(2, 3, 2), 3, basis="brackets"), "basis is 'brackets'"),
        (lambda: logsignature(torch.zeros(2, 3, 2), 3, backend="pysigilb"), "Did you mean 'pysiglib'"),
        (lambda: clock_logsignature(torch.zeros(4), torch.zeros(2, 5), 3), "times \\(L,\\)"),
        (lambda: clock_logsignature(torch.tensor([0.0, 0.5, 0.2]), torch.zeros(2, 3), 3), "non-decreasing"),
        (lambda: clock_logsignature(torch.tensor([0.0, math.nan]), torch.zeros(2, 2), 3), "finite"),
    ],
)
def test_errors(call, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


@pytest.mark.parametrize("backend", ["pysiglib", "signatory"])
def test_a_missing_backend_names_its_extra(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args, **kwargs):
        if name.partition(".")[0] == backend:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=f"{backend}.*builtin"):
        logsignature(torch.zeros(2, 3, 2), 3, backend=backend)
