"""Diffusion tree search: walks over a chain as a tree, steered by any reward; a state may be anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genkit._lazy import lazy_exports

if TYPE_CHECKING:
    from genkit.samplers.tree.chain import Chain as Chain
    from genkit.samplers.tree.engine import TreeSearch as TreeSearch
    from genkit.samplers.tree.objectives import SCALARISATION_FORMS as SCALARISATION_FORMS
    from genkit.samplers.tree.objectives import Directions as Directions
    from genkit.samplers.tree.objectives import MultiObjective as MultiObjective
    from genkit.samplers.tree.objectives import PerObjective as PerObjective
    from genkit.samplers.tree.objectives import das_dennis as das_dennis
    from genkit.samplers.tree.objectives import scalarise as scalarise
    from genkit.samplers.tree.options import MODES as MODES
    from genkit.samplers.tree.options import SearchOptions as SearchOptions
    from genkit.samplers.tree.population import POTENTIALS as POTENTIALS
    from genkit.samplers.tree.population import RESAMPLINGS as RESAMPLINGS
    from genkit.samplers.tree.population import Population as Population
    from genkit.samplers.tree.population import PopulationResult as PopulationResult
    from genkit.samplers.tree.population import beam as beam
    from genkit.samplers.tree.population import best_of_n as best_of_n
    from genkit.samplers.tree.population import self_normalised as self_normalised
    from genkit.samplers.tree.population import smc as smc
    from genkit.samplers.tree.proposals import GuidedProposal as GuidedProposal
    from genkit.samplers.tree.proposals import effective_share as effective_share
    from genkit.samplers.tree.proposals import tune_guidance as tune_guidance
    from genkit.samplers.tree.result import Leaves as Leaves
    from genkit.samplers.tree.result import TreeResult as TreeResult
    from genkit.samplers.tree.selection import Policy as Policy
    from genkit.samplers.tree.selection import Scalarisation as Scalarisation
    from genkit.samplers.tree.selection import SingleObjective as SingleObjective
    from genkit.samplers.tree.store import NodeStore as NodeStore

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Chain": ".chain",
        "Directions": ".objectives",
        "GuidedProposal": ".proposals",
        "Leaves": ".result",
        "MODES": ".options",
        "MultiObjective": ".objectives",
        "NodeStore": ".store",
        "POTENTIALS": ".population",
        "PerObjective": ".objectives",
        "Policy": ".selection",
        "Population": ".population",
        "PopulationResult": ".population",
        "RESAMPLINGS": ".population",
        "SCALARISATION_FORMS": ".objectives",
        "Scalarisation": ".selection",
        "SearchOptions": ".options",
        "SingleObjective": ".selection",
        "TreeResult": ".result",
        "TreeSearch": ".engine",
        "beam": ".population",
        "best_of_n": ".population",
        "das_dennis": ".objectives",
        "effective_share": ".proposals",
        "scalarise": ".objectives",
        "self_normalised": ".population",
        "smc": ".population",
        "tune_guidance": ".proposals",
    },
)
