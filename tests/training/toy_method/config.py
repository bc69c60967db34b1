"""The toy regression as a method, so that configuration files and commands can name it."""

from __future__ import annotations

from training import toys

from genkit.training import ConfigPart, Recipe, TrainerConfig


class Toy(ConfigPart):
    size: int = 20
    dropout: float = 0.2
    width: int = 8


class Config(TrainerConfig):
    toy: Toy = Toy()


def build(config: Config) -> Recipe:
    net = toys.make_net(config.seed, width=config.toy.width, dropout=config.toy.dropout)
    return Recipe(toys.Regression(net), toys.make_data(config.toy.size), toys.save_net)
