"""Configurations: mistakes are named, and the whole path from a configuration to a saved pipeline that writes."""

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

import genkit
from genkit.data.tasks import ALPHABET
from genkit.errors import ConfigError
from genkit.pipelines.block_diffusion import config as module
from genkit.pipelines.block_diffusion.baselines.annealing import AnnealingObjective
from genkit.pipelines.block_diffusion.config import Config, build, build_model, build_objective, held_out_rows
from genkit.pipelines.block_diffusion.tokens import character_tokenizer
from genkit.training import Trainer, load_config

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "block_diffusion"
SMALL = {"name": "small", "layers": 1, "width": 16, "heads": 2, "max_length": 64}
VERSES = "\n".join(f"verse {i}: and it came to pass." for i in range(60))


def make(folder, data=None, model=None, diffusion=None, **changes):
    values = {
        "output_dir": str(folder),
        "max_steps": 4,
        "batch_size": 4,
        "progress": False,
        "device": "cpu",
        "data": data or {"name": "tasks", "tasks": ["copy"], "num_samples": 64},
        "model": SMALL if model is None else model,
        "diffusion": {"block_length": 4} | (diffusion or {}),
    }
    return Config.model_validate(values | changes)


def run(config):
    """Trains, and gives the log and the saved pipeline."""
    recipe = build(config)
    log = list(Trainer(recipe.objective, config, recipe.data, recipe.save_pipeline).train())
    pipe = genkit.load(Path(config.output_dir) / "pipeline")
    pipe.set_progress_bar_config(disable=True)
    return log, pipe, recipe


@pytest.fixture
def verses(monkeypatch):
    """A short text in place of the King James Bible, so that no package is needed."""

    def text(split="all", holdout=0.1):
        cut = int(len(VERSES) * (1 - holdout))
        return {"all": VERSES, "train": VERSES[:cut], "test": VERSES[cut:]}[split]

    monkeypatch.setattr(module, "king_james_text", text)


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("diffusion.block_lenght=4", "block_length"),
        ("diffusion.curriculum.size=[2]", "sizes"),
        ("model.widht=8", "width"),
        ("model.width=10", "no multiple of 2 x heads"),
        ("model.name=big", "small"),
        ("data.name=bible", "kjv"),
        ("data.tasks=[adition]", "Did you mean 'addition'"),
        ("diffusion.weight=1/n", "1/k"),
        ("diffusion.t_range=[0.0, 1.0]", "0 < low < high"),
        ("diffusion.clean_rule=block", "leak"),
        ("diffusion.recipe=anneal", "annealing"),
        ("diffusion.block_length=0", "block_length"),
        ("pretraining.steps=1000000", "more than max_steps"),
        ("init_from=nowhere", "nowhere"),
        ("batch_size=true", "batch_size"),
    ],
)
def test_mistakes_are_named(override, message, tmp_path):
    small = ["data.num_samples=64", "model.layers=1", f"output_dir={tmp_path}/run"]
    with pytest.raises(genkit.errors.GenkitError, match=message):
        config = load_config(CONFIGS / "addition.yaml", [*small, override], Config)
        recipe = build(config)
        next(iter(Trainer(recipe.objective, config, recipe.data).train()))


def test_parts_that_do_not_fit_together_are_refused(tmp_path, verses):
    responses = {"name": "responses", "path": "answers.jsonl"}
    with pytest.raises(ValidationError, match="data 'responses' needs pretrained"):
        make(tmp_path, responses)
    with pytest.raises(ValidationError, match=r"sizes=\[2, 4\] end at 4, but diffusion.block_length is 8"):
        make(tmp_path, diffusion={"block_length": 8, "curriculum": {"sizes": [2, 4]}})
    with pytest.raises(ConfigError, match="have 128 tokens, the model reads 64"):
        build(make(tmp_path, {"name": "kjv"}))
    for part in ({"complementary": True}, {"clean_rule": "block", "shift": False, "ar_weight": 0.0}):
        with pytest.raises(ConfigError, match="annealing has no clean half"):
            build(make(tmp_path, diffusion={"recipe": "annealing"} | part))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_committed_configurations_are_valid(path):
    assert load_config(path, [], Config).method == "block_diffusion"


# --- what is built ----------------------------------------------------------------------------------------------------


def test_weights_depend_on_the_seed_alone(tmp_path):
    state = torch.get_rng_state()
    first, again, other = (build_model(make(tmp_path, seed=s))[0].state_dict() for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_the_objective_has_the_options_of_the_configuration(tmp_path):
    part = {
        "block_length": 12,
        "curriculum": {"ramp": 0.25, "mix": 0.0},
        "ar_weight": 0.25,
        "t_range": [0.1, 0.9],
        "weight": "1/t",
        "antithetic": False,
        "complementary": True,
        "random_offset": False,
    }
    config = make(tmp_path, diffusion=part, pretraining={"steps": 1, "learning_rate_factor": 2.0})
    model, tokenizer, mask = build_model(config)
    got = build_objective(config, model, mask, tokenizer.eos_token_id)
    assert (got.scorer.mask_token_id, got.fill_token_id) == (2, 1)
    assert tuple(got.curriculum.sizes) == (2, 4, 8, 12)
    assert (got.curriculum.steps, got.curriculum.ramp, got.curriculum.mix) == (3, 0.25, 0.0)
    assert (got.ar_weight, got.t_range, got.weighting) == (0.25, (0.1, 0.9), "1/t")
    assert (got.antithetic, got.complementary, got.random_offset) == (False, True, False)
    phases = [(p.name, p.steps, p.learning_rate_factor) for p in got.phases()]
    assert phases == [("ar", 1, 2.0), ("blocks", 3, 1.0)]
    whole = make(tmp_path, diffusion={"curriculum": None}, pretraining={"steps": 4})
    assert [p.name for p in build_objective(whole, model, mask).phases()] == ["ar"]
    assert tuple(build_objective(whole, model, mask).curriculum.sizes) == (4,)
    kind = build_objective(make(tmp_path, diffusion={"recipe": "annealing"}), model, mask)
    assert isinstance(kind, AnnealingObjective)


def test_text_is_trained_on_and_the_saved_pipeline_writes(tmp_path, verses):
    config = make(tmp_path / "run", {"name": "kjv", "length": 32}, pretraining={"steps": 2})
    log, pipe, recipe = run(config)
    assert [entry.phase for entry in log] == ["ar", "ar", "blocks", "blocks"]
    out = pipe(["verse 1", "and it"], max_new_tokens=9)
    assert out.tokens.shape[1] <= 9 and (out.tokens != 2).all() and len(out.text) == 2
    for name, value in recipe.objective.scorer.model.state_dict().items():
        assert torch.equal(pipe.model.state_dict()[name], value)
    assert pipe.tokenizer.get_vocab().keys() >= set(VERSES)
    assert pipe.config["block_length"] == 4 and pipe.config["rule"] == "causal"
    card = (tmp_path / "run" / "pipeline" / "README.md").read_text()
    assert "King James" in card and str(tmp_path) not in card
    held = held_out_rows(config, pipe.tokenizer, 2)
    assert held["tokens"].shape == (2, 32)
    text = pipe.tokenizer.decode(held["tokens"][0])
    assert text in module.king_james_text("test")


@pytest.mark.parametrize("recipe", ["block", "annealing"])
def test_tasks_are_trained_on_and_the_saved_pipeline_writes(tmp_path, recipe):
    log, pipe, _ = run(make(tmp_path / "run", diffusion={"recipe": recipe}))
    assert all(torch.isfinite(torch.tensor(entry.loss)) for entry in log)
    assert pipe.config["rule"] == ("full" if recipe == "annealing" else "causal")
    assert pipe("Cgenkit=", max_new_tokens=8).tokens.shape[0] == 1
    assert len(pipe.tokenizer) == len(ALPHABET) + 3


def test_training_starts_from_another_pipeline_s_weights(tmp_path):
    base = make(tmp_path / "base", seed=3)
    run(base)
    folder = str(tmp_path / "base" / "pipeline")
    model = build_model(make(tmp_path / "next", seed=4, init_from=folder))[0]
    saved = genkit.load(folder).model.state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    with pytest.raises(ConfigError, match="and .* more.* differ from this model's tensors"):
        build_model(make(tmp_path / "next", model=SMALL | {"width": 24}, init_from=folder))
    with pytest.raises(ConfigError, match="differ from this model's tensors"):
        build_model(make(tmp_path / "next", model=SMALL | {"layers": 2}, init_from=folder))


# --- pretrained models and a user's own data --------------------------------------------------------------------------


@pytest.fixture
def pretrained(tmp_path, tiny):
    """A folder with a small Llama and a character tokenizer."""
    tokenizer = character_tokenizer("abcdefgh =+0123456789", 64)
    tiny(vocab=len(tokenizer), dtype=torch.float32).save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    return {"name": "pretrained", "source": str(tmp_path / "lm")}


def answers(folder):
    lines = [json.dumps({"prompt": f"{i}+{i}=", "response": str(2 * i)}) for i in range(60)]
    (folder / "answers.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return {"name": "responses", "path": str(folder / "answers.jsonl"), "length": 16}


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4}])
def test_a_response_file_is_trained_on_with_and_without_lora(tmp_path, pretrained, lora):
    data = answers(tmp_path)
    config = make(tmp_path / "run", data, pretrained | {"lora": lora}, learning_rate=0.01)
    before = build_model(config)[0].state_dict()
    _, pipe, recipe = run(config)
    trained = recipe.objective.scorer.model.state_dict()
    moved = {name for name, value in trained.items() if not torch.equal(value, before[name])}
    assert moved and (lora is None or all("lora_" in name for name in moved))
    prompts = ["3+3=", "12+12="]
    assert torch.equal(
        pipe(prompts, max_new_tokens=6).tokens,
        type(pipe)(recipe.objective.scorer.model.eval(), pipe.tokenizer, block_length=4)(
            prompts, max_new_tokens=6
        ).tokens,
    )
    card = (tmp_path / "run" / "pipeline" / "README.md").read_text()
    assert "answers.jsonl" in card and str(tmp_path) not in card
    held = held_out_rows(config, pipe.tokenizer, 100)
    assert held["response_start"].tolist() == [6]  # "49+49=", each fiftieth line
    assert pipe.tokenizer.decode(held["tokens"][0, 6:9]) == "98<eos>"


def test_text_files_are_packed_and_held_out_rows_are_not_trained_on(tmp_path, pretrained):
    (tmp_path / "mine.txt").write_text("abcdefgh " * 200, encoding="utf-8")
    data = {"name": "text", "files": [str(tmp_path / "mine.txt")], "length": 16, "holdout": 0.25}
    config = make(tmp_path / "run", data, pretrained)
    _, pipe, _ = run(config)
    train, test = (len(config.data.load(pipe.tokenizer, split)) for split in ("train", "test"))
    assert (train, test) == (85, 28)
    with pytest.raises(ConfigError, match="leave none for 'test'"):
        make(tmp_path, data | {"length": 1800}, pretrained).data.load(pipe.tokenizer, "test")


def test_a_character_outside_the_alphabet_is_named(tmp_path, pretrained):
    (tmp_path / "mine.txt").write_text("abc xyz " * 40, encoding="utf-8")
    data = {"name": "text", "files": [str(tmp_path / "mine.txt")], "length": 16}
    with pytest.raises(ConfigError, match="character 'x' at place 4 is not in this model's alphabet"):
        build(make(tmp_path / "run", data, pretrained))
