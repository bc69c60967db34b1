"""The pipeline a user holds: crystals from a frozen diffusion model, searched for what a reward wants.

Differs from the paper in: everything that its abstract does not state, which is all but the principle (tree search at
inference with guided proposals, importance-corrected backups and selection, per-objective soft values); see this
folder's README.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import BaseOutput
from torch import Tensor

from genkit._checks import checked_count
from genkit.errors import ConfigError, nearest
from genkit.metrics.pareto import ParetoArchive
from genkit.pipeline import GenkitPipeline
from genkit.pipelines.crystal_tree_search.hull import Hull, as_hull
from genkit.pipelines.crystal_tree_search.model import CrystalTransformer
from genkit.pipelines.crystal_tree_search.potentials import CHGNetPotential, Potential
from genkit.pipelines.crystal_tree_search.reward_pool import RewardPool
from genkit.pipelines.crystal_tree_search.rewards import (
    CrystalReward,
    DensityReward,
    FormationEnergyReward,
    NovelStabilityReward,
    ScarcityReward,
    SpaceGroupReward,
    StabilityReward,
)
from genkit.pipelines.crystal_tree_search.state import CrystalCodec
from genkit.pipelines.crystal_tree_search.structures import to_structures, write_cifs, write_extxyz
from genkit.rewards import Reward, RewardOutput
from genkit.rewards.stack import StackedRewards
from genkit.samplers.noise import draw_keys
from genkit.samplers.tree.chain import Chain
from genkit.samplers.tree.engine import MODES, SearchOptions, TreeSearch
from genkit.samplers.tree.objectives import PerObjective
from genkit.samplers.tree.population import beam, best_of_n, self_normalised, smc
from genkit.samplers.tree.proposals import GuidedProposal, tune_guidance
from genkit.samplers.tree.result import TreeResult
from genkit.samplers.tree.rows import draw_distinct, take
from genkit.schedulers.product import ProductScheduler
from genkit.serialization import load_json, save_json

__all__ = ["OBJECTIVES", "CrystalTreeSearchOutput", "CrystalTreeSearchPipeline", "DecodedReward"]

#: Names that ``objectives`` understands besides rewards.
OBJECTIVES = ("stability", "novel_stability", "formation_energy", "density", "scarcity", "space_group")
POPULATIONS = ("base", "best_of_n", "snis", "smc", "beam")
#: What crystals without a value count as: below the worst of the named objectives (novel_stability: −1.4 eV per atom).
FLOOR = -1.5
#: The upper end of ``guidance_scale="auto"``, and the pilot that finds it: samples, bisections of a level.
LARGEST_GUIDANCE, PILOT_SAMPLES, PILOT_ITERATIONS = 2.0, 32, 4


@dataclass
class CrystalTreeSearchOutput(BaseOutput):
    """What a call returns.

    Args:
        structures: n pymatgen structures (``output_type="pymatgen"``), ASE atoms (``"ase"``), or the physical crystals
            themselves, a dict of tensors (``"pt"``).
        ids: n names, the same in files.
        rewards: float64 (n, M), one column an objective, NaN where a crystal was not valid.
        valid: bool (n,).
        objectives: the M objectives' names.
        crystals: the physical crystals, (n, \\*) each (see :mod:`.state`).
        archive: the Pareto archive of everything the search judged; None with one objective.
        tree: the search's tree (:class:`~genkit.samplers.tree.result.TreeResult`), or the population.
        diagnostics: JSON-able: network calls, seconds, Z, effective sample sizes, counts, the proposal and its base.
    """

    structures: Any
    ids: list[str]
    rewards: Tensor
    valid: Tensor
    objectives: list[str]
    crystals: dict[str, Tensor]
    archive: ParetoArchive | None
    tree: Any
    diagnostics: dict[str, Any] = field(default_factory=dict)


class DecodedReward(Reward):
    """A reward of physical crystals as one of the chain's states.

    Args:
        reward: of physical crystals.
        codec: how states become crystals.
    """

    differentiable = False

    def __init__(self, reward: Reward, codec: CrystalCodec) -> None:
        self.reward, self.codec = reward, codec

    def values(self, sample: Any, context: Any) -> RewardOutput:
        """See :class:`genkit.rewards.Reward`."""
        return self.reward(self.codec.decode(sample), context)


class FunctionOfCrystals(CrystalReward):
    """A function (crystals, context) → values (B,) as a reward that is asked about valid crystals only.

    Args:
        function: what judges; NaN where it cannot tell.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    def judge(self, crystals: Mapping[str, Tensor], valid: Tensor, context: Any) -> tuple[Tensor, dict[str, Any]]:
        """See :class:`.rewards.CrystalReward`."""
        rows = torch.nonzero(valid).squeeze(1)
        values = torch.full((len(valid),), math.nan, dtype=torch.float64, device=valid.device)
        if len(rows):
            values[rows] = torch.as_tensor(self.function(take(crystals, rows), context)).to(values)
        return values, {}

    def __repr__(self) -> str:
        return f"FunctionOfCrystals({self.name})"


class CrystalTreeSearchPipeline(GenkitPipeline):
    """Searches the chain of a frozen crystal diffusion model for stable, symmetric or otherwise wanted crystals.

    Args:
        model: the trained network.
        scheduler: the chain of the codec's fields.
        codec: physical crystals ↔ the chain's states.
    """

    model_cpu_offload_seq = "model"

    def __init__(self, model: CrystalTransformer, scheduler: ProductScheduler, codec: CrystalCodec) -> None:
        super().__init__()
        self.register_modules(model=model, scheduler=scheduler, codec=codec)
        self._shared: dict[str, Any] = {}

    # ---- what is wanted ------------------------------------------------------------------------------------------

    def reward(self, objective: str | Reward | Callable[..., Any], space_group: int | None = None) -> Reward:
        """An objective as a reward of physical crystals.

        Args:
            objective: a name of :data:`OBJECTIVES`, a reward, or a function (crystals, context) that gives values (B,).
            space_group: the target of ``"space_group"``.

        Raises:
            ConfigError: an unknown name, or ``"space_group"`` without a target.
        """
        if isinstance(objective, Reward):
            return objective
        if callable(objective):
            return FunctionOfCrystals(objective)
        if objective not in OBJECTIVES:
            known = ", ".join(OBJECTIVES)
            raise ConfigError(
                f"objective {objective!r} is unknown; expected one of {known}, a Reward, or a function of crystals."
                f"{nearest(str(objective), OBJECTIVES)}"
            )
        if objective == "space_group":
            if space_group is None:
                raise ConfigError("objective 'space_group' has no target; give space_group=, a number from 1 to 230")
            return SpaceGroupReward(space_group)
        if objective in ("density", "scarcity"):
            return DensityReward() if objective == "density" else ScarcityReward()
        if objective == "novel_stability":
            from genkit.pipelines.crystal_tree_search.proto8 import known_crystals

            return NovelStabilityReward(self.potential, self.hull, known_crystals())
        kind = StabilityReward if objective == "stability" else FormationEnergyReward
        return kind(self.potential, self.hull)

    @property
    def potential(self) -> Potential:
        """The potential of the energies: CHGNet, loaded at its first use; assign another one to replace it."""
        return self._shared.setdefault("potential", CHGNetPotential())

    @potential.setter
    def potential(self, value: Potential) -> None:
        self._shared["potential"] = value

    @property
    def hull(self) -> Hull:
        """The hull of the stability objective: of CHGNet's energies of proto8; assign one's own to replace it."""
        if "hull" not in self._shared:
            self._shared["hull"] = as_hull("self")
        hull: Hull = self._shared["hull"]
        return hull

    @hull.setter
    def hull(self, value: Any) -> None:
        self._shared["hull"] = as_hull(value)

    # ---- the call ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def __call__(
        self,
        num_rollouts: int = 256,
        num_samples: int | None = None,
        *,
        objectives: str | Reward | Sequence[Any] | None = None,
        mode: str = "dts",
        condition: Mapping[str, int] | None = None,
        space_group: int | None = None,
        guidance_scale: float | Sequence[float] | str = 1.0,
        base_probability: float = 0.3,
        formula: Mapping[str | int, int] | None = None,
        num_inference_steps: int | None = None,
        times: Sequence[float] | Tensor | None = None,
        levels: int | Sequence[int] = 8,
        lam: float = 20.0,
        widening: tuple[float, float] = (2.0, 0.8),
        min_visits: int = 3,
        slots: int | None = None,
        batch_size: int | None = None,
        scalarisation: Any = None,
        max_network_calls: int | None = None,
        reward_processes: int = 0,
        reward_timeout: float | None = None,
        save_every: int | None = None,
        search_options: Mapping[str, Any] | None = None,
        generator: torch.Generator | None = None,
        save_dir: str | Path | None = None,
        resume: bool = False,
        output_type: str = "pymatgen",
        return_dict: bool = True,
    ) -> CrystalTreeSearchOutput | tuple[Any, ...]:
        """Searches and returns the crystals found.

        Args:
            num_rollouts: rollouts of the search; in ``"smc"`` the number of particles, in ``"beam"`` of candidates.
            num_samples: crystals delivered, n (None: a sixteenth of the rollouts). ``"dts"``, ``"snis"`` and ``"smc"``
                draw them from the tilted distribution without repetition, ``"dts_star"`` and ``"beam"`` take the best,
                ``"best_of_n"`` the best of each of n groups; ``"base"`` walks n, guided where there is a condition.
            objectives: a name of :data:`OBJECTIVES`, a reward of physical crystals, a function (crystals, context), or
                several of them. None: ``"stability"``, or ``"space_group"`` where a ``space_group`` is given.
            mode: ``"dts"``, ``"dts_star"`` (or ``"dts*"``), ``"unbiased"``; or a baseline: ``"base"``, ``"best_of_n"``,
                ``"snis"``, ``"smc"``, ``"beam"``.
            condition: what the guided proposal is told, ``{"space_group": 225, "stability": 1}``.
            space_group: short for that entry of ``condition``, and the target of the objective of that name; numbers of
                atoms are proposed from those of its crystals too, and weighed back.
            guidance_scale: of the proposal, above 0; one number, or one for each level. ``"auto"``: for each level the
                largest up to 2 at which the weights of 32 pilot samples keep an effective share of one half.
            base_probability: share of the edges that are drawn from the base itself; weights are at most its inverse.
            formula: fixes the composition of the cell, ``{"Na": 1, "Cl": 1}``.
            num_inference_steps: micro-steps of the walk (64, unless ``times`` are given).
            times: custom times instead, strictly decreasing from 1 to 0.
            levels: macro-edges of the tree, or the micro-steps where they end.
            lam: inverse temperature of the reward.
            widening, min_visits: see :class:`~genkit.samplers.TreeSearch`.
            slots: rollouts side by side (None: a sixteenth of the rollouts, from 1 to 64).
            batch_size: rows of one network call.
            scalarisation: for several objectives, see :mod:`genkit.samplers.tree.objectives`; None: per objective, with
                Dirichlet weights. The population modes weigh the objectives equally, or by ``preference`` among the
                ``search_options``.
            max_network_calls: a search starts no rollout that would exceed it; None: no limit.
            reward_processes: judge in so many processes; 0: in this one.
            reward_timeout: seconds a batch of the reward may take before its crystals count as invalid (needs a
                process of its own, which it gets); None: any time.
            save_every: rollouts between the saves in ``save_dir`` (None: a sixteenth of them, at most 1000).
            search_options: further options of :class:`~genkit.samplers.tree.engine.SearchOptions`, or of the baseline.
            generator: gives the search its key.
            save_dir: folder for the search's saves, and for the result: ``structures.extxyz`` and ``cif/``.
            resume: continue the search saved there.
            output_type: ``"pymatgen"``, ``"ase"`` or ``"pt"``.
            return_dict: False returns a tuple.

        Raises:
            ConfigError: an impossible argument; the message names it.
        """
        mode = {"dts*": "dts_star"}.get(mode, mode)
        self._check_call(mode, output_type, save_dir, resume, guidance_scale, max_network_calls)
        num_inference_steps = 64 if num_inference_steps is None and times is None else num_inference_steps
        condition = self._checked_condition(condition, space_group)
        names, reward = self._objectives(objectives, space_group)
        num_samples = max(1, num_rollouts // 16) if num_samples is None else checked_count("num_samples", num_samples)
        slots = min(64, max(1, num_rollouts // 16)) if slots is None else checked_count("slots", slots)
        chain = Chain(
            self.model,
            self.codec.scheduler(fixed_types=formula is not None),
            num_inference_steps=num_inference_steps,
            times=times,
            levels=levels,
            proposal=self._proposal(condition, guidance_scale, base_probability),
            stages=self.codec.stages(
                formula, condition.get("space_group"), 0.0 if mode == "base" else base_probability
            ),
            batch_size=batch_size,
        )
        pilot_calls = 0
        if chain.proposal is not None and guidance_scale == "auto":
            generator, pilot = (_seeded(key) for key in draw_keys(generator, 2).key.tolist())
            proposal, pilot_calls = tune_guidance(
                chain, num_samples=PILOT_SAMPLES, iterations=PILOT_ITERATIONS, generator=pilot,
                device=self._execution_device,
            )  # fmt: skip
            chain = chain.with_proposal(proposal)
            if max_network_calls is not None:
                if pilot_calls >= max_network_calls:
                    raise ConfigError(
                        f"guidance_scale='auto' spent {pilot_calls} network calls on its pilot, max_network_calls="
                        f"{max_network_calls} leaves none for the search; allow more, or give the guidance as numbers"
                    )
                max_network_calls -= pilot_calls
        known = all(name in OBJECTIVES for name in names)  # another reward may have any range
        options = {"floor": FLOOR if known else -math.inf, **(search_options or {})}
        if mode not in POPULATIONS:
            _check_options(options, [f.name for f in fields(SearchOptions)], mode)
            if scalarisation is None and len(names) > 1:
                scalarisation = PerObjective(len(names))
            settings: dict[str, Any] = {"lam": lam, "widening": widening, "min_visits": min_visits, "slots": slots}
            settings |= {"scalarisation": scalarisation, **options}
            if max_network_calls is not None:
                settings["max_network_calls"] = max_network_calls
        elif len(names) > 1 and mode != "base":
            options.setdefault("preference", [1.0 / len(names)] * len(names))
        processes = reward_processes if reward_timeout is None else max(1, reward_processes)
        with RewardPool(reward, processes, timeout=reward_timeout, threads=torch.get_num_threads()) as pool:
            judge = DecodedReward(pool, self.codec)
            if mode in POPULATIONS:
                found = self._population(mode, chain, judge, num_rollouts, num_samples, lam, slots, generator, options)
            else:
                search = TreeSearch.on_chain(chain, judge, SearchOptions(mode=mode, **settings))
                wanted = [f"{name}: {one!r}" for name, one in zip(names, _parts(reward), strict=True)]
                told: dict[str, Any] = {"objectives": wanted}
                told |= {"formula": formula, "condition": condition, "codec": dict(self.codec.config)}
                saves = None if save_dir is None else _record(Path(save_dir), told, resume)
                every = max(1, min(1000, num_rollouts // 16)) if save_every is None else save_every
                found = self._search(search, num_rollouts, num_samples, generator, saves, resume, every)
            found["report"]["pilot_calls"] = pilot_calls
            found["report"]["reward_failures"] = [asdict(failure) for failure in pool.failures[:100]]
        output = self._output(found, names, chain, output_type, save_dir)
        return output if return_dict else output.to_tuple()

    def _check_call(
        self, mode: str, output_type: str, save_dir: Any, resume: bool, guidance_scale: Any, max_network_calls: Any
    ) -> None:
        known = (*MODES, *POPULATIONS)
        if mode not in known:
            raise ConfigError(f"mode={mode!r}; expected one of {', '.join(known)}.{nearest(str(mode), known)}")
        if output_type not in ("pymatgen", "ase", "pt"):
            raise ConfigError(f"output_type={output_type!r}; expected 'pymatgen', 'ase' or 'pt'")
        if mode in POPULATIONS and (save_dir is not None or resume):
            raise ConfigError(f"mode={mode!r} does not save on its way; leave save_dir and resume out")
        if mode in POPULATIONS and max_network_calls is not None:
            raise ConfigError(
                f"mode={mode!r} makes num_rollouts walks; leave max_network_calls out, it limits searches"
            )
        if isinstance(guidance_scale, str) and guidance_scale != "auto":
            raise ConfigError(f"guidance_scale={guidance_scale!r}; expected a number, one for each level, or 'auto'")

    def _checked_condition(self, condition: Mapping[str, int] | None, space_group: int | None) -> dict[str, int]:
        """The entries of the condition, each known to the network."""
        given = dict(condition or {})
        if space_group is not None and given.setdefault("space_group", space_group) != space_group:
            raise ConfigError(f"space_group={space_group}, but condition has {given['space_group']}; give one of them")
        limits = {"space_group": 230, "stability": int(self.model.config["stability_bins"])}
        for name, value in given.items():
            if name not in limits:
                raise ConfigError(
                    f"condition has {name!r}, which the model was not trained with; it knows {', '.join(limits)}."
                    f"{nearest(name, limits)}"
                )
            if checked_count(f"condition[{name!r}]", value) > limits[name]:
                raise ConfigError(f"condition[{name!r}]={value}; expected 1 to {limits[name]}")
        return given

    def _proposal(self, condition: Mapping[str, int], scale: Any, base_probability: float) -> GuidedProposal | None:
        if not condition:
            return None
        cond = {name: torch.tensor([value], device=self._execution_device) for name, value in condition.items()}
        scale = LARGEST_GUIDANCE if isinstance(scale, str) else scale
        return GuidedProposal(cond, guidance_scale=scale, base_probability=base_probability)

    def _objectives(self, objectives: Any, space_group: int | None) -> tuple[list[str], Reward]:
        if objectives is None:
            objectives = "stability" if space_group is None else "space_group"
        several = list(objectives) if isinstance(objectives, (list, tuple)) else [objectives]
        if not several:
            raise ConfigError("objectives is empty; expected at least one")
        rewards = [self.reward(one, space_group) for one in several]
        pairs = zip(several, rewards, strict=True)
        names = [one if isinstance(one, str) else getattr(made, "name", repr(made)) for one, made in pairs]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"objectives names {names}; expected each once (FunctionReward(f, name=...) names a function)"
            )
        return names, rewards[0] if len(rewards) == 1 else StackedRewards(dict(zip(names, rewards, strict=True)))

    # ---- walks ---------------------------------------------------------------------------------------------------

    def _search(
        self, search: TreeSearch, num_rollouts: int, num: int, generator: Any, folder: Any, resume: bool, every: int
    ) -> dict[str, Any]:
        shown = not self._progress_bar_disabled()
        result = search.run(num_rollouts, generator, save_dir=folder, resume=resume, save_every=every, progress=shown)
        leaves = result.best(num) if search.options.mode == "dts_star" and result.leaves.rewards.shape[1] == 1 else None
        if leaves is None:
            leaves = result.sample_distinct(num, _seeded(result.key))
        found = {"states": leaves.states, "rewards": leaves.rewards, "valid": leaves.valid, "tree": result}
        return found | {"ids": [f"leaf-{i:06d}" for i in leaves.simulation.tolist()], "report": result.diagnostics()}

    def _population(
        self,
        mode: str,
        chain: Chain,
        reward: Reward,
        num_rollouts: int,
        num: int,
        lam: float,
        slots: int,
        generator: Any,
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        shared: dict[str, Any] = {"generator": generator, "slots": slots, "device": self._execution_device}
        shared |= {"progress": not self._progress_bar_disabled(), **options}
        if mode == "base":
            result = best_of_n(chain, reward, num, weighted=False, **shared)
        elif mode == "best_of_n":
            result = best_of_n(chain, reward, num_rollouts, num, **shared)
        elif mode == "snis":
            result = self_normalised(chain, reward, num_rollouts, lam=lam, **shared)
        elif mode == "smc":
            result = smc(chain, reward, num_rollouts, lam=lam, **shared)
        else:
            branch = options.get("branch", 2)
            result = beam(chain, reward, max(1, num_rollouts // branch), num, **shared)
        report: dict[str, Any] = {name: getattr(result, name) for name in ("network_calls", "reward_calls", "log_z")}
        report |= {"seconds": dict(result.seconds), "effective_share_by_level": list(result.ess)}
        rows = torch.arange(len(result))
        if mode in ("snis", "smc"):
            chance = torch.where(result.valid, result.log_weights.double(), -math.inf).softmax(0)
            rows = draw_distinct(chance, num, int(draw_keys(generator, 1).key[0])).to(chance.device)
        found = {name: take(getattr(result, name), rows) for name in ("rewards", "valid")}
        found |= {"states": take(result.samples, rows), "ids": [f"sample-{i:06d}" for i in rows.tolist()]}
        return found | {"tree": result, "report": report}

    # ---- results -------------------------------------------------------------------------------------------------

    def _output(
        self, found: Mapping[str, Any], names: list[str], chain: Chain, output_type: str, save_dir: Any
    ) -> CrystalTreeSearchOutput:
        crystals = self.codec.decode(found["states"])
        report = {**found["report"], "objectives": names, "num_inference_steps": chain.num_steps}
        report["proposal"] = None if chain.proposal is None else chain.proposal.describe()
        output = CrystalTreeSearchOutput(
            structures=_as_type(crystals, output_type),
            ids=list(found["ids"]),
            rewards=found["rewards"].to(torch.float64),
            valid=found["valid"],
            objectives=names,
            crystals=crystals,
            archive=_archive(found["tree"], len(names)),
            tree=found["tree"],
            diagnostics=report,
        )
        if save_dir is not None:
            write_structures(output, save_dir)
        return output

    def write_samples(self, output: Any, out_dir: Any, *, call: Mapping[str, Any] | None = None) -> Path:
        """Write a call's crystals as ``structures.extxyz`` and ``cif/`` besides the tensors."""
        kept = {"crystals": output.crystals, "rewards": output.rewards, "valid": output.valid}
        values = {"ids": output.ids, "objectives": output.objectives, "diagnostics": output.diagnostics}
        folder = super().write_samples({**kept, **values}, out_dir, call=call)
        write_structures(output, folder)
        return folder

    def _progress_bar_disabled(self) -> bool:
        return bool(getattr(self, "_progress_bar_config", {}).get("disable", False))


def _parts(reward: Reward) -> list[Reward]:
    return list(reward.rewards.values()) if isinstance(reward, StackedRewards) else [reward]


def _record(folder: Path, told: Mapping[str, Any], resume: bool) -> Path:
    """The folder of the search's saves; what the call asked for stands beside it, and a resumed one must ask the same.

    Raises:
        ConfigError: ``resume`` with other objectives, formula, condition or codec than the first call had.
    """
    path = folder / "call.json"
    if resume and path.is_file():
        first, now = load_json(path), json.loads(json.dumps(told, default=str))
        for name in now:
            if first.get(name) != now[name]:
                raise ConfigError(
                    f"the search in {folder} has {name}={first.get(name)!r}, this call {now[name]!r}; resume it with "
                    "the same arguments, or choose another save_dir"
                )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        save_json(path, json.loads(json.dumps(told, default=str)))
    return folder / "search"


def _check_options(options: Mapping[str, Any], known: Sequence[str], mode: str) -> None:
    for name in options:
        if name not in known:
            expected = ", ".join(sorted(known))
            raise ConfigError(f"search_options has {name!r}; mode={mode!r} knows {expected}.{nearest(name, known)}")


def _seeded(key: int) -> torch.Generator:
    return torch.Generator().manual_seed(key % 2**63)


def write_structures(output: CrystalTreeSearchOutput, folder: str | Path) -> None:
    """Writes the valid crystals of a call as ``structures.extxyz`` and one CIF each, under the same ids."""
    kept = torch.nonzero(output.valid).squeeze(1)
    crystals = {name: value[kept] for name, value in output.crystals.items()}
    ids = [output.ids[i] for i in kept.tolist()]
    columns = {f"reward_{i}": output.rewards[kept, i].tolist() for i in range(output.rewards.shape[1])}
    write_extxyz(Path(folder) / "structures.extxyz", crystals, ids, columns, overwrite=True)
    write_cifs(Path(folder) / "cif", crystals, ids, overwrite=True)
    for path in (Path(folder) / "cif").glob("*-??????.cif"):
        if path.stem not in ids:  # of an earlier call that delivered more
            path.unlink()


def _as_type(crystals: dict[str, Tensor], output_type: str) -> Any:
    if output_type == "pt":
        return crystals
    if output_type == "ase":
        from genkit.pipelines.crystal_tree_search.structures import to_atoms

        return to_atoms(crystals, skip=True)
    return to_structures(crystals, skip=True)


def _archive(tree: Any, objectives: int) -> ParetoArchive | None:
    """Everything valid that was judged, under the numbers that the crystals' names have."""
    if objectives < 2:
        return None
    archive = ParetoArchive(objectives)
    judged: Any = tree.leaves if isinstance(tree, TreeResult) else tree.population
    weights = judged.log_weight if isinstance(tree, TreeResult) else judged.log_weights
    rows = torch.nonzero(judged.valid).squeeze(1)
    ids = judged.simulation if isinstance(tree, TreeResult) else torch.arange(len(judged.valid))
    if len(rows):
        archive.add(judged.rewards[rows], ids=ids[rows], log_weights=weights[rows])
    return archive
