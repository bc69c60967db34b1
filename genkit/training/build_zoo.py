"""Rebuilds the zoo: trains an entry from its committed configuration and writes it in half precision with its number.

    python -m genkit.training.build_zoo returns-flow returns-gaussian

Used by maintainers; the weights are committed again only when they improve.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from genkit.errors import ConfigError, nearest
from genkit.pipeline import load
from genkit.registry import method_module
from genkit.serialization import load_json
from genkit.training.config_files import changed_keys, load_config
from genkit.training.trainer import Trainer
from genkit.zoo import ROOT, ZooEntry, add_to_zoo

__all__ = ["RECIPES", "ZooRecipe", "build_entry", "main"]


@dataclass(frozen=True)
class ZooRecipe:
    """How an entry is made: its method, configuration file and ``key=value`` changes."""

    method: str
    config: str
    overrides: tuple[str, ...] = ()

    def command(self, name: str) -> str:
        """The command line that trains the same weights."""
        changes = "".join(f" '{change}'" for change in self.overrides)
        return f"genkit train {self.config} output_dir=out/{name}{changes}"


_RETURNS = "configs/heavy_tailed_flow/returns.yaml"
RECIPES = {
    "returns-flow": ZooRecipe("heavy_tailed_flow", _RETURNS),
    "returns-gaussian": ZooRecipe("heavy_tailed_flow", _RETURNS, ("clock={law: gaussian}", "coupling=independent")),
    "mixture2d-flow": ZooRecipe("heavy_tailed_flow", "configs/heavy_tailed_flow/mixture2d.yaml"),
    "tasks-block": ZooRecipe("block_diffusion", "configs/block_diffusion/addition.yaml"),
    "kjv-block": ZooRecipe("block_diffusion", "configs/block_diffusion/kjv.yaml", ("max_steps=3000",)),
    "features-digits": ZooRecipe("rmmd", "configs/rmmd/features_digits.yaml"),
    "features-emoji32": ZooRecipe("rmmd", "configs/rmmd/features_emoji32.yaml"),
    "digits-rmmd": ZooRecipe("rmmd", "configs/rmmd/digits.yaml", ("reward=null", "max_steps=7000")),
    "weather-rmmd": ZooRecipe("rmmd", "configs/rmmd/weather.yaml"),
    "proto8-crystal": ZooRecipe("crystal_tree_search", "configs/crystal_tree_search/proto8.yaml"),
    "proto8-diffcsp": ZooRecipe("crystal_tree_search", "configs/crystal_tree_search/proto8_diffcsp.yaml"),
}


def build_entry(name: str, root: Path = ROOT, run: Path | None = None) -> ZooEntry:
    """Trains, measures and saves one entry, and enters it in the manifest.

    Args:
        name: an entry of `RECIPES`.
        root: the zoo's folder.
        run: a finished run of the entry's command, used instead of training anew; one of another configuration is
            refused.
    """
    if name not in RECIPES:
        raise ConfigError(f"no zoo recipe {name!r}; there are {', '.join(RECIPES)}.{nearest(name, RECIPES)}")
    recipe = RECIPES[name]
    config: Any = load_config(recipe.config, [*recipe.overrides, f"output_dir=out/{name}"])
    with tempfile.TemporaryDirectory() as folder:
        if run is None:
            run = Path(folder) / "run"
            _train(recipe, run)
        _check_run(config, run)
        pipe = load(run / "pipeline")
    metric, value = method_module(recipe.method, "evaluate").headline(pipe, config)
    facts = {
        "training_config": config.resolved(),
        "command": recipe.command(name),
        "metrics": {metric: round(value, 4)},
    }
    pipe.save_pretrained(root / name, dtype=torch.float16, card=pipe.model_card() | facts)
    return add_to_zoo(
        {
            "name": name,
            "folder": name,
            "method": recipe.method,
            "config": recipe.config,
            "command": recipe.command(name),
            "metric": f"{metric}: {value:.4f}",
            "licence": "Apache-2.0",
        },
        root,
    )


def _train(recipe: ZooRecipe, folder: Path) -> None:
    config: Any = load_config(recipe.config, [*recipe.overrides, f"output_dir={folder}"])
    built = method_module(recipe.method, "config").build(config)
    for _ in Trainer(built.objective, config, built.data, built.save_pipeline).train():
        pass


def _check_run(config: Any, run: Path) -> None:
    """Refuses a run whose weights another configuration decided."""
    trained = type(config).model_validate(load_json(run / "config.json"))
    if trained.config_hash() != config.config_hash():
        changed = changed_keys(trained.resolved(), config)
        for key in sorted(config.free_on_resume - config.unhashed):  # a resumed run may change them, these weights not
            if getattr(trained, key) != getattr(config, key):
                changed.append(f"{key}: {getattr(trained, key)!r} there, {getattr(config, key)!r} in the command")
        raise ConfigError(f"{run} was trained with other settings than the zoo's command: {'; '.join(changed)}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m genkit.training.build_zoo", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(RECIPES), help=f"entries: {', '.join(RECIPES)}")
    parser.add_argument("--run", type=Path, help="a finished run of the one entry's command, instead of training")
    arguments = parser.parse_args(argv)
    if arguments.run is not None and len(arguments.names) != 1:
        parser.error("--run goes with one name")
    for name in arguments.names:
        print(build_entry(name, run=arguments.run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
