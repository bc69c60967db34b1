"""Configuration cannot silently lie: strict types, unknown keys, missing files, overrides, changes on resume."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError

from genkit.errors import ConfigError
from genkit.training import ConfigPart, TrainerConfig, load_config
from genkit.training.config_files import apply_overrides, changed_keys, parse_config, read_yaml


class Stable(ConfigPart):
    law: Literal["stable"]
    alpha: float = 1.7


class Gaussian(ConfigPart):
    law: Literal["gaussian"]


class Config(TrainerConfig):
    clock: Annotated[Stable | Gaussian, Field(discriminator="law")] = Gaussian(law="gaussian")
    sizes: tuple[int, int] = (1, 2)


def load(tmp_path: Path, text: str, *overrides: str, model: type = Config) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides, model)


BASE = "output_dir: out\nmax_steps: 10\n"


def test_numbers_words_and_lists_are_read_by_the_core_rules(tmp_path):
    text = (
        BASE
        + "learning_rate: 1e-4\nmixed_precision: no\nweight_decay: 1\nsizes: [3, 4]\nclock: {law: stable, alpha: 1.5}\n"
    )
    config = load(tmp_path, text)
    assert config.learning_rate == 1e-4  # YAML 1.1 reads the word "1e-4"
    assert config.mixed_precision == "no"  # and here the boolean False
    assert config.weight_decay == 1.0 and config.sizes == (3, 4) and config.clock.alpha == 1.5


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("learing_rate: 1e-3", ["run.yaml: learing_rate: unknown key", "'learning_rate'"]),
        ("clock: {law: stable, alpah: 1.5}", ["run.yaml: clock.alpah: unknown key", "'alpha'"]),
        ("clock: {law: stabel}", ["clock", "stable", "gaussian"]),
        ('progress: "False"', ["progress", "'False' (str)", "boolean", "without quotes"]),
        ("progress: no", ["progress", "'no' (str)", "boolean"]),
        ('batch_size: "64"', ["batch_size", "'64' (str)", "integer"]),
        ("batch_size: 6.5", ["batch_size", "6.5 (float)", "integer"]),
        ("batch_size: 0", ["batch_size", "greater than or equal to 1"]),
        ("learning_rate: .nan", ["learning_rate", "finite"]),
        ("learning_rate: fast", ["learning_rate", "'fast' (str)"]),
        ("lr_scheduler: cosin", ["lr_scheduler", "'cosine'"]),
        ("seed: -1", ["seed"]),
        ("schema_version: 2", ["run.yaml: schema_version: got 2", "reads 1"]),
        ("seed: 1\nseed: 2", ["run.yaml, line", "'seed' is given twice"]),
        ("seed: [1", ["run.yaml, line", "not valid YAML"]),
        ("3: 4", ["run.yaml: the key 3 (int) is no name"]),
        ("null: 4", ["run.yaml: the key null (NoneType) is no name"]),
        ("clock: {law: stable, 3: 4}", ["run.yaml: clock: the key 3 (int) is no name"]),
    ],
)
def test_wrong_lines_are_refused_by_file_key_and_nearest_key(tmp_path, line, expected):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, BASE + line + "\n")
    for part in expected:
        assert part in str(caught.value)


def test_every_problem_is_listed_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "output_dir: out\nsede: 1\nbatch_size: x\n")
    assert all(key in str(caught.value) for key in ("max_steps: the key is missing", "sede: unknown key", "batch_size"))


def test_files_that_are_missing_empty_or_no_mapping(tmp_path):
    (tmp_path / "returns.yaml").write_text("")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    for name, message in {
        "retruns.yaml": "no such configuration file. Did you mean 'returns.yaml'?",
        "returns.yaml": "empty",
        "list.yaml": "list, expected a mapping",
        "bytes.yaml": "bytes.yaml",
    }.items():
        with pytest.raises(ConfigError, match=r"\.yaml") as caught:
            read_yaml(tmp_path / name)
        assert message in str(caught.value)


def test_overrides_reach_into_parts_and_are_named_as_the_source(tmp_path):
    config = load(
        tmp_path,
        BASE + "clock: {law: stable}\n",
        "clock.alpha=1.9",
        "learning_rate=2e-3",
        "ema_decay=null",
        "max_steps=7",
    )
    assert (config.clock.alpha, config.learning_rate, config.ema_decay, config.max_steps) == (1.9, 2e-3, None, 7)
    assert load(tmp_path, BASE, "learning_rate={student: 1e-3}").learning_rate == {"student": 1e-3}
    for override, message in {
        "clock.alpah=1": "command line: clock.alpah: unknown key",
        "progress=False ": "",
        "max_steps": "not of the form key=value",
        "max_steps.x=1": "max_steps is 10, which has no keys inside",
        'progress="False"': "command line: progress: got 'False' (str)",
        "batch_size=[": "command line: batch_size",
    }.items():
        text = BASE + "clock: {law: stable}\n"
        if not message:
            assert load(tmp_path, text, override).progress is False
            continue
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, text, override)
        assert message in str(caught.value)


def test_overrides_leave_their_input_alone():
    values = {"clock": {"law": "stable"}}
    assert apply_overrides(values, ["clock.alpha=1.2"])["clock"] == {"law": "stable", "alpha": 1.2}
    assert values == {"clock": {"law": "stable"}}


def test_the_method_is_looked_up_and_its_nearest_name_given(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.yaml: method: .*heavy_tail_flow"):
        load(tmp_path, BASE + "method: heavy_tail_flow\n", model=None)
    with pytest.raises(ConfigError, match="method: got None.*Did you mean 'method'"):
        load(tmp_path, BASE + "methd: rmmd\n", model=None)


def test_python_values_are_as_strict_and_the_object_is_frozen():
    with pytest.raises(ValidationError):
        TrainerConfig(output_dir="a", max_steps=1, progress="False")
    config = TrainerConfig(output_dir="a", max_steps=1)
    with pytest.raises(ValidationError):
        config.seed = 3


def test_resolved_configuration_reads_back_and_its_hash_sees_what_trains():
    config = Config(output_dir="a", max_steps=5, clock=Stable(law="stable"))
    again = parse_config(Config, config.resolved(), source="memory")
    assert again == config and again.config_hash() == config.config_hash()
    assert config.model_copy(update={"output_dir": "b", "logging_steps": 3}).config_hash() == config.config_hash()
    assert config.model_copy(update={"seed": 1}).config_hash() != config.config_hash()


def test_changed_keys_are_named_with_both_values_and_free_ones_pass():
    config = Config(output_dir="a", max_steps=5, clock=Stable(law="stable"))
    free = config.model_copy(update={"max_steps": 9, "save_steps": 2, "output_dir": "b", "report_to": "tensorboard"})
    assert changed_keys(config.resolved(), free) == []
    changed = config.model_copy(update={"seed": 4, "clock": Stable(law="stable", alpha=1.2)})
    assert changed_keys(config.resolved(), changed) == [
        "clock.alpha: 1.7 in the checkpoint, 1.2 now",
        "seed: 0 in the checkpoint, 4 now",
    ]
    younger = {k: v for k, v in config.resolved().items() if k != "ema_start_step"}
    assert changed_keys(younger, config) == []
    with pytest.raises(ConfigError, match="another set of keys"):
        changed_keys(config.resolved() | {"gone": 1}, config)
