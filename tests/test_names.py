"""docs/names.md is the dictionary of the pipelines: whatever a user can pass, read or configure has a row there."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import genkit.pipelines

PAGE = Path(__file__).resolve().parents[1] / "docs" / "names.md"
PIPELINES = sorted(genkit.pipelines.__all__)


def without_a_row(names: set[str], page: str) -> set[str]:
    """Those of ``names`` that no table row of the page defines in its first column."""
    first_cells = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("|"))
    single_keys = " ".join(re.findall(r"Two single keys.*?\n\n", page, re.DOTALL))
    return names - set(re.findall(r"`(\w+)`", first_cells + single_keys))


@pytest.mark.parametrize("name", PIPELINES)
def test_call_arguments_are_in_the_dictionary(name: str) -> None:
    call = inspect.signature(getattr(genkit.pipelines, name).__call__)
    missing = without_a_row(set(call.parameters) - {"self"}, PAGE.read_text(encoding="utf-8"))
    assert not missing, f"{name}: add rows for {sorted(missing)} to docs/names.md, or use the names that are there"


@pytest.mark.parametrize("name", PIPELINES)
def test_output_fields_are_in_the_dictionary(name: str) -> None:
    pipeline = getattr(genkit.pipelines, name)
    outputs = vars(inspect.getmodule(pipeline)).values()
    fields = {
        field.name
        for output in outputs
        if inspect.isclass(output) and output.__module__ == pipeline.__module__ and dataclasses.is_dataclass(output)
        for field in dataclasses.fields(output)
    }
    missing = without_a_row(fields, PAGE.read_text(encoding="utf-8"))
    assert fields and not missing, f"{name}: {sorted(missing)}"


def test_configuration_keys_are_in_the_dictionary() -> None:
    from genkit.registry import method_module, method_names
    from genkit.training import TrainerConfig

    page = PAGE.read_text(encoding="utf-8")
    keys = set(TrainerConfig.model_fields)
    for method in method_names():
        keys |= set(method_module(method, "config").Config.model_fields)
    assert not without_a_row(keys, page), sorted(without_a_row(keys, page))


def test_a_name_without_a_row_is_seen() -> None:
    assert without_a_row({"generator", "rng"}, PAGE.read_text(encoding="utf-8")) == {"rng"}
