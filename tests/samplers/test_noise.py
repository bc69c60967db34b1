"""Counter-based noise: published vectors, laws, and independence of batch, chunk, order and compilation."""

from __future__ import annotations

import math
import zlib

import pytest
import torch
from scipy import stats

from genkit.samplers import Keys, draw_keys, training_keys
from genkit.samplers.noise import philox4x32, purpose_code

# the known-answer file of Random123 (philox4x32, 10 rounds): counter, key, words
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def keys_of(count: int, seed: int = 0) -> Keys:
    return draw_keys(torch.Generator().manual_seed(seed), count)


def philox_by_hand(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The paper's recursion in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return tuple(c)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_words(counter, key, words):
    got = philox4x32([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
    assert tuple(int(w) for w in got) == words


def test_philox_equals_the_recursion_in_python_integers():
    gen = torch.Generator().manual_seed(3)
    counter = torch.randint(0, 2**32, (4, 50), generator=gen)
    key = torch.randint(0, 2**32, (2, 50), generator=gen)
    got = torch.stack(philox4x32(list(counter), list(key)))
    for i in range(50):
        expected = philox_by_hand(tuple(counter[:, i].tolist()), tuple(key[:, i].tolist()))
        assert tuple(got[:, i].tolist()) == expected


def test_the_counter_of_a_draw_is_block_sample_step_purpose():
    keys = Keys(torch.tensor([(5 << 32) | 9]), torch.tensor([3]), torch.tensor(7), "time")
    expected = [w for block in range(2) for w in philox_by_hand((block, 3, 7, zlib.crc32(b"time")), (9, 5))]
    assert keys.words(7)[0].tolist() == expected[:7]


def test_purpose_is_the_crc32_of_its_name():
    for name in ("latents", "transition/coords", "", "clock/µ"):
        assert purpose_code(name) == zlib.crc32(name.encode())


def test_noise_depends_on_the_samples_key_alone():
    keys = keys_of(7)
    whole = keys.normal((3, 5))
    order = torch.tensor([4, 0, 6, 2])
    assert torch.equal(keys[order].normal((3, 5)), whole[order])
    assert torch.equal(torch.cat([keys[:2].normal((3, 5)), keys[2:].normal((3, 5))]), whole)
    for i in range(7):
        alone = draw_keys([torch.Generator().manual_seed(100 + i)], 1)
        together = draw_keys([torch.Generator().manual_seed(100 + j) for j in range(7)], 7)
        assert torch.equal(alone.normal((4,))[0], together.normal((4,))[i])


def test_a_larger_shape_only_appends_numbers():
    keys = keys_of(4)
    assert torch.equal(keys.normal((9,)), keys.normal((30,))[:, :9])
    assert torch.equal(keys.uniform((9,)), keys.uniform((30,))[:, :9])


def test_one_step_per_sample_equals_separate_steps():
    keys = keys_of(3)
    mixed = keys.at(step=torch.tensor([5, 0, 9])).normal((6,))
    for i, step in enumerate((5, 0, 9)):
        assert torch.equal(mixed[i], keys.at(step=step).normal((6,))[i])


def test_training_noise_is_keyed_by_seed_step_and_dataset_index():
    ids = torch.tensor([11, 4, 250_000])
    keys = training_keys(17, 1000, ids)
    assert torch.equal(keys.normal((4,))[[2, 0]], training_keys(17, 1000, ids[[2, 0]]).normal((4,)))
    for other in (training_keys(18, 1000, ids), training_keys(17, 1001, ids), training_keys(17, 1000, ids + 1)):
        assert not torch.equal(keys.normal((4,)), other.normal((4,)))


def test_normals_have_the_normal_law():
    values = keys_of(2000, 5).normal((250,)).double().flatten()
    n = values.numel()
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0), (6, 15.0)):
        spread = math.sqrt(stats.norm.moment(2 * power) - moment**2)
        assert abs(float(values.pow(power).mean()) - moment) < 4.5 * spread / math.sqrt(n)
    assert stats.kstest(values[:100_000].numpy(), "norm").statistic < 1.63 / math.sqrt(100_000)
    assert 4.0 < float(values.abs().max()) < 6.7  # 32-bit Box-Muller ends at sqrt(66 log 2) = 6.76


def test_uniforms_fill_the_open_interval():
    values = keys_of(2000, 6).uniform((100,)).flatten()
    assert 0.0 < float(values.min()) and float(values.max()) < 1.0
    assert stats.kstest(values.numpy(), "uniform").statistic < 1.63 / math.sqrt(values.numel())
    assert bool((keys_of(100).exponential((100,)) > 0).all())


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF])
def test_uniform_and_normal_stay_finite_at_the_extreme_words(monkeypatch, word):
    def extreme(self: Keys, count: int) -> tuple[torch.Tensor, ...]:
        return (torch.full((len(self), count), word),) * 4

    monkeypatch.setattr(Keys, "_blocks", extreme)
    keys = keys_of(2)
    assert bool(((keys.uniform((4,)) > 0) & (keys.uniform((4,)) < 1)).all())
    assert bool(torch.isfinite(keys.normal((4,))).all())
    assert bool((keys.exponential((4,)) > 0).all())


def test_purposes_steps_neighbouring_keys_and_elements_are_uncorrelated():
    n = 200_000
    keys = keys_of(n)
    base = keys.normal((2,)).double()
    others = {
        "purpose": keys.at(purpose="transition").normal(()).double(),
        "step": keys.at(step=1).normal(()).double(),
        "key + 1": Keys(keys.key + 1, keys.sample, keys.step).normal(()).double(),
        "element": base[:, 1],
        "sample": Keys(keys.key, keys.sample + 1, keys.step).normal(()).double(),
    }
    for name, other in others.items():
        for f in (lambda v: v, torch.square):
            correlation = torch.corrcoef(torch.stack((f(base[:, 0]), f(other))))[0, 1]
            assert abs(float(correlation)) < 4.5 / math.sqrt(n), name


def test_one_generator_draws_the_keys_in_order_and_a_list_one_key_each():
    expected = torch.randint(0, torch.iinfo(torch.int64).max, (5,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(keys_of(5, 1).key, expected)
    generators = [torch.Generator().manual_seed(i) for i in range(3)]
    first = draw_keys(generators, 3)
    second = draw_keys(generators, 3)
    assert not torch.equal(first.key, second.key)  # the generators moved on
    assert torch.equal(first.key, draw_keys([torch.Generator().manual_seed(i) for i in range(3)], 3).key)
    with pytest.raises(ValueError, match="list of 3 generators, but there are 4 samples"):
        draw_keys(generators, 4)


def test_an_empty_batch_has_empty_noise():
    assert keys_of(0).normal((3,)).shape == (0, 3)
    assert draw_keys([], 0).normal((2, 2)).shape == (0, 2, 2)
    assert keys_of(2).normal((0,)).shape == (2, 0)


def test_drawing_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    keys = keys_of(3)
    keys.normal((5,)), keys.uniform((5,)), keys.words(3)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.slow
def test_compiled_noise_is_bit_equal():
    def draw(keys: Keys) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return keys.at(purpose="transition").normal((3, 33)), keys.uniform((17,)), keys.words(5)

    compiled = torch.compile(draw, fullgraph=True)
    for count, step in ((64, 0), (64, 3), (5, 3)):
        keys = keys_of(count, count).at(step=step)
        for ours, theirs in zip(draw(keys), compiled(keys), strict=True):
            assert torch.equal(ours, theirs)
