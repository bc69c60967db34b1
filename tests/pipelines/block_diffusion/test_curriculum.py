"""Block sizes along training."""

from collections import Counter

import pytest
import torch

from genkit.errors import ConfigError
from genkit.pipelines.block_diffusion.curriculum import BlockCurriculum, doubling_sizes
from genkit.pipelines.block_diffusion.objective import BlockDiffusionObjective
from genkit.samplers.noise import training_keys


def test_doubling_ends_at_the_target():
    assert [doubling_sizes(n) for n in (1, 2, 3, 8, 12, 32)] == [
        (1,),
        (2,),
        (2, 3),
        (2, 4, 8),
        (2, 4, 8, 12),
        (2, 4, 8, 16, 32),
    ]


def test_sizes_before_the_target_share_the_ramp_equally():
    curriculum = BlockCurriculum([1, 2, 4, 8], 120, ramp=0.5)
    sizes = [curriculum.block_length(step) for step in range(200)]
    assert Counter(sizes[:120]) == {1: 20, 2: 20, 4: 20, 8: 60}
    assert sizes == sorted(sizes) and sizes[120:] == [8] * 80
    assert sizes == [curriculum.block_length(step) for step in range(200)]  # a function of the step alone


@pytest.mark.parametrize(("sizes", "steps", "ramp"), [([2, 4, 8], 7, 0.5), ([2, 3, 4, 5, 6], 3, 1.0), ([2, 4], 1, 0.3)])
def test_sizes_grow_also_where_steps_are_few(sizes, steps, ramp):
    curriculum = BlockCurriculum(sizes, steps, ramp)
    got = [curriculum.block_length(step) for step in range(steps + 3)]
    assert got == sorted(got) and got[-1] == sizes[-1]


def test_the_edges_of_the_ramp():
    assert {BlockCurriculum([2, 4, 8], 10, 0.0).block_length(step) for step in range(10)} == {8}
    whole = [BlockCurriculum([2, 4, 8], 10, 1.0).block_length(step) for step in range(11)]
    assert whole == [2] * 5 + [4] * 5 + [8]
    assert {BlockCurriculum([5], 10, 1.0, 1.0).block_length(step, 0.0) for step in range(10)} == {5}


def test_mixing_takes_the_previous_size_in_the_first_tenth_of_a_stage():
    curriculum = BlockCurriculum([2, 4, 8], 400, ramp=0.5, mix=0.25)
    plain = BlockCurriculum([2, 4, 8], 400, ramp=0.5)
    mixed = [step for step in range(400) if curriculum.block_length(step, 0.2) != plain.block_length(step)]
    assert mixed == [*range(100, 110), *range(200, 210)]  # the target's stage is as long as the others' here
    assert [curriculum.block_length(step, 0.2) for step in (100, 200)] == [2, 4]
    assert all(curriculum.block_length(step, 0.25) == plain.block_length(step) for step in range(400))


def test_a_resumed_run_meets_the_sizes_of_an_uninterrupted_one(tiny):
    """Size and offset of step s are functions of (seed, s): another object, asked in another order, agrees."""

    model = tiny(layers=1)

    def met(steps):
        objective = BlockDiffusionObjective(model, 2, BlockCurriculum([2, 4, 8], 100, ramp=1.0, mix=0.5))
        return {s: objective._blocks(s, {}, training_keys(3, s, torch.tensor([7 + s, 1]))) for s in steps}

    whole, resumed = met(range(100)), met(reversed(range(53, 100)))
    assert all(resumed[s] == whole[s] for s in range(53, 100))
    sizes = [size for size, _ in whole.values()]
    assert sizes != sorted(sizes)  # mixing
    assert all(0 <= offset < size for size, offset in whole.values())
    assert {offset for _, offset in whole.values()} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": []}, "at least one block length, growing"),
        ({"sizes": [4, 2]}, "growing"),
        ({"sizes": [2, 2]}, "growing"),
        ({"sizes": [0, 2]}, "at least 1"),
        ({"sizes": [2.0]}, "sizes=2.0"),
        ({"steps": 0}, "steps=0"),
        ({"ramp": 1.5}, "ramp=1.5"),
        ({"mix": -0.1}, "mix=-0.1"),
        ({"mix": float("nan")}, "mix=nan"),
    ],
)
def test_impossible_schedules_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        BlockCurriculum(**{"sizes": [2, 4], "steps": 10} | options)
