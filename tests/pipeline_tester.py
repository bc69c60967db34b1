"""What every pipeline must do: a mixin of tests after diffusers' list, with our promises on randomness and files."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import genkit
from genkit.errors import GenkitError
from genkit.serialization import load_tensors

__all__ = ["PipelineTesterMixin"]

_SCRIPT = """
import json, sys
{preamble}
import torch
torch.set_num_threads(1)
import genkit
for folder, out, options, seed in json.loads(sys.argv[1]):
    pipe = genkit.load(folder)
    pipe.set_progress_bar_config(disable=True)
    pipe.write_samples(pipe(**options, generator=torch.Generator().manual_seed(seed)), out)
"""
ROOT = Path(__file__).resolve().parents[1]


class PipelineTesterMixin:
    """Subclass it in a test class and define the three members below; `tmp_path` and `capsys` come from pytest.

    Tensors of an output must be equal, or agree to ``tolerance`` where the batch size differs.
    """

    #: options of the call beside generator and num_samples; JSON values, small enough for a test
    call_options: dict[str, Any] = {"num_inference_steps": 3}
    #: float32 rounding of matrix kernels at another batch size
    tolerance = 1e-5
    #: lines of Python that a fresh process needs before it can load the pipeline
    subprocess_preamble = ""

    def make_pipeline(self) -> Any:
        raise NotImplementedError

    def replacement(self) -> tuple[str, Any]:
        """A component's name and another component of its kind, which must change the samples."""
        raise NotImplementedError

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _pipe(self) -> Any:
        torch.set_num_threads(1)
        pipe = self.make_pipeline()
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def _call(self, pipe: Any, num_samples: int = 2, seed: int = 5, **options: Any) -> Any:
        options.setdefault("generator", torch.Generator().manual_seed(seed))
        return pipe(num_samples=num_samples, **self.call_options, **options)

    @staticmethod
    def _tensors(output: Any) -> dict[str, torch.Tensor]:
        found = {key: value for key, value in output.items() if isinstance(value, torch.Tensor)}
        assert found, "the output has no tensor field"
        return found

    def _assert_equal(self, first: Any, second: Any) -> None:
        first, second = self._tensors(first), self._tensors(second)
        assert first.keys() == second.keys()
        for key in first:
            assert torch.equal(first[key], second[key]), key

    # --- files --------------------------------------------------------------------------------------------------------

    def test_saved_pipeline_gives_equal_output_in_a_fresh_process(self, tmp_path: Path) -> None:
        pipe = self._pipe()
        pipe.save_pretrained(tmp_path / "pipe")
        loaded = genkit.load(tmp_path / "pipe")
        assert type(loaded) is type(pipe)
        loaded.save_pretrained(tmp_path / "again")
        options = {"num_samples": 2, **self.call_options}
        jobs = [[str(tmp_path / name), str(tmp_path / f"out-{name}"), options, 5] for name in ("pipe", "again")]
        command = [sys.executable, "-c", _SCRIPT.format(preamble=self.subprocess_preamble), json.dumps(jobs)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=100)
        expected = self._tensors(self._call(pipe))
        for name in ("pipe", "again"):
            got = load_tensors(tmp_path / f"out-{name}" / "samples.safetensors")
            assert got.keys() == expected.keys()
            assert all(torch.equal(got[key], expected[key]) for key in got)

    def test_saved_files_name_no_place_on_this_machine(self, tmp_path: Path) -> None:
        self._pipe().save_pretrained(tmp_path / "pipe")
        genkit.load(tmp_path / "pipe").save_pretrained(tmp_path / "again")
        first, again = (self._texts(tmp_path / name) for name in ("pipe", "again"))
        assert first == again
        assert all(str(tmp_path) not in text for text in first.values())

    @staticmethod
    def _texts(folder: Path) -> dict[str, str]:
        files = [p for p in folder.rglob("*") if p.suffix in {".json", ".md"}]
        return {p.relative_to(folder).as_posix(): p.read_text() for p in files}

    # --- calls --------------------------------------------------------------------------------------------------------

    def test_tuple_equals_output_object(self) -> None:
        pipe = self._pipe()
        output, values = self._call(pipe), self._call(pipe, return_dict=False)
        assert isinstance(values, tuple)
        assert len(values) == len(output.to_tuple())
        for a, b in zip(output.to_tuple(), values, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    def test_same_seed_same_bits_and_another_seed_differs(self) -> None:
        pipe = self._pipe()
        first = self._call(pipe)
        self._assert_equal(first, self._call(pipe))
        other = self._call(pipe, seed=6)
        assert not torch.equal(first[0], other[0])

    def test_sample_depends_on_its_own_generator_only(self) -> None:
        pipe = self._pipe()
        batch = self._tensors(self._call(pipe, 3, generator=[torch.Generator().manual_seed(s) for s in (1, 2, 3)]))
        shuffled = self._tensors(self._call(pipe, 3, generator=[torch.Generator().manual_seed(s) for s in (3, 1, 2)]))
        for position, seed in enumerate((1, 2, 3)):
            single = self._tensors(self._call(pipe, 1, generator=[torch.Generator().manual_seed(seed)]))
            for key, value in batch.items():
                torch.testing.assert_close(single[key][0], value[position], rtol=self.tolerance, atol=self.tolerance)
                moved = shuffled[key][(1, 2, 0)[position]]
                torch.testing.assert_close(moved, value[position], rtol=self.tolerance, atol=self.tolerance)

    def test_first_samples_do_not_depend_on_how_many_are_drawn(self) -> None:
        pipe = self._pipe()
        few, many = self._tensors(self._call(pipe, 2)), self._tensors(self._call(pipe, 4))
        for key, value in few.items():
            torch.testing.assert_close(many[key][:2], value, rtol=self.tolerance, atol=self.tolerance)

    def test_random_state_outside_the_generator_is_untouched(self, tmp_path: Path) -> None:
        pipe = self._pipe()
        before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes())  # noqa: NPY002
        self._call(pipe)
        pipe.save_pretrained(tmp_path / "pipe")
        genkit.load(tmp_path / "pipe")
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == random.getstate()
        assert before[2] == np.random.get_state()[1].tobytes()  # noqa: NPY002

    def test_callback_sees_every_step_and_can_change_latents(self) -> None:
        pipe = self._pipe()
        steps: list[int] = []

        def zero_at_first(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            steps.append(step)
            assert set(tensors) == set(pipe._callback_tensor_inputs)
            return {"latents": torch.zeros_like(tensors["latents"])} if step == 0 else tensors

        names = list(pipe._callback_tensor_inputs)
        options = {"callback_on_step_end": zero_at_first, "callback_on_step_end_tensor_inputs": names}
        changed = self._call(pipe, **options)
        assert steps == list(range(self.call_options["num_inference_steps"]))
        assert not torch.equal(changed[0], self._call(pipe)[0])
        with pytest.raises(GenkitError, match="latent"):
            self._call(pipe, callback_on_step_end=zero_at_first, callback_on_step_end_tensor_inputs=["latent"])

    def test_components_can_be_swapped(self, tmp_path: Path) -> None:
        pipe = self._pipe()
        plain = self._call(pipe)
        pipe.save_pretrained(tmp_path / "pipe")
        name, component = self.replacement()
        loaded = type(pipe).from_pretrained(tmp_path / "pipe", **{name: component})
        loaded.set_progress_bar_config(disable=True)
        setattr(pipe, name, component)
        swapped = self._call(pipe)
        self._assert_equal(swapped, self._call(loaded))
        assert not torch.equal(plain[0], swapped[0])

    def test_progress_bar_can_be_switched_off(self, capsys: pytest.CaptureFixture[str]) -> None:
        pipe = self._pipe()
        self._call(pipe)
        assert capsys.readouterr().err == ""
        pipe.set_progress_bar_config(disable=False)
        self._call(pipe)
        assert "it/s" in capsys.readouterr().err
