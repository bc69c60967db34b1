"""The engine of a tree search: fixed slots that walk the chain side by side, each at its own micro-step.

One tick advances all busy slots by one network call. A state at a level's end becomes a node; a clean sample goes to
the queue of the reward, which is asked in batches of its own; judged leaves are backed up; free slots are refilled at
once by new rollouts, which leave the tree where :mod:`genkit.samplers.tree.selection` says. With ``sync=True`` the
order of all this is fixed, so a search is a function of its key, its settings and its number of slots: not of the
network's batch, of the machine's speed or of interruptions. With ``sync=False`` the reward is asked in a second thread
while the denoising goes on.

Differs from the paper (Diffusion Tree Sampling, arXiv:2506.20701) in: weighted edges, the visit quota, rollouts in
flight, and macro-edges; its widening constants are not known here, so C and alpha are configuration.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from genkit._checks import checked_count
from genkit.errors import ConfigError
from genkit.rewards import Reward
from genkit.samplers.noise import Keys, draw_keys
from genkit.samplers.tree.backup import back_up, renew_all
from genkit.samplers.tree.chain import Chain, put, row_count, take
from genkit.samplers.tree.checkpoint import SavedPart, SearchSaver, search_settings
from genkit.samplers.tree.judging import Judged, LeafLog, judge
from genkit.samplers.tree.options import MODES, Counts, SearchOptions
from genkit.samplers.tree.result import TreeResult
from genkit.samplers.tree.selection import (
    Descent,
    Scalarisation,
    SingleObjective,
    descend,
    grow_at,
    select_uniforms,
    withdraw,
)
from genkit.samplers.tree.store import Ints, NodeStore

__all__ = ["MODES", "SearchOptions", "TreeSearch"]

Callback = Callable[[Mapping[str, Any]], None]


class TreeSearch:
    """Searches the chain of a frozen denoiser for samples of p(x_0) exp(lam r(x_0)), or for the best ones.

    Values of nodes are soft values (1/lam) log E exp(lam r), backed up with importance weights where a proposal draws
    the edges; the target stays the base chain tilted by the reward, whatever the proposal.

    Args:
        denoiser: (x_t, t, cond) → model output.
        scheduler: the chain; its kernel must be stochastic.
        reward: judges clean samples; invalid, not finite or raising ones get ``floor`` and are counted.
        proposal: a :class:`~genkit.samplers.tree.proposals.GuidedProposal` to draw edges from.
        mode: ``"dts"`` (sampling), ``"dts_star"`` or ``"dts*"`` (search for the best), ``"unbiased"`` (fixed
            branching).
        lam: inverse temperature of the reward, from 0 to inf.
        widening: (C, alpha): a node with N visits may have C (N + 1)^alpha children.
        min_visits: visits of a child before it enters the Boltzmann draw. Without such a quota values that were low by
            chance freeze and the search gets worse with its budget; with it, the allocation below some thousands of
            rollouts is nearly independent of the values.
        num_inference_steps, times, levels, shape, stages, eta, batch_size: see :class:`Chain`.
        slots: rollouts that walk side by side. Few slots per leaf search better, many are faster.
        trees: independent trees, which take the rollouts in turn.
        reward_batch: leaves that are judged together; None: a quarter of the slots.
        sync: a fixed order of events (reproducible), or the reward in a second thread (faster, order as it comes).
        explore: share of uniform choices (``dts``).
        c_uct, kappa: bonus for rarely visited children, and weight of the base model (``dts_star``).
        branching: children of nodes at depth 1, 2, … (``unbiased``).
        floor: value of leaves that could not be judged; -inf is probability 0.
        scalarisation: for rewards (B, M): see :mod:`genkit.samplers.tree.objectives`. Until its scale is known, every
            rollout starts at the root, so that the first ``warm_up`` valid leaves (in the order of the rollouts), which
            the scale is fitted to, are independent draws of the chain.
        max_network_calls: no rollout starts that would take more calls in all; the first one that does not fit ends
            the search, whether or not ``num_rollouts`` are done (``counts["out_of_calls"]``). None: no limit.

    Raises:
        ConfigError: arguments that cannot mean what they say.
    """

    def __init__(
        self,
        denoiser: Any,
        scheduler: Any,
        reward: Reward,
        *,
        proposal: Any = None,
        mode: str = "dts",
        lam: float = 1.0,
        widening: tuple[float, float] = (2.0, 0.8),
        min_visits: int = 3,
        num_inference_steps: int | None = None,
        times: Tensor | Sequence[float] | None = None,
        levels: int | Sequence[int] = 8,
        shape: Any = None,
        stages: Sequence[Any] | None = None,
        eta: float | None = None,
        slots: int = 64,
        trees: int = 1,
        batch_size: int | None = None,
        reward_batch: int | None = None,
        sync: bool = True,
        explore: float = 0.0,
        c_uct: float = 1.0,
        kappa: float = 1.0,
        branching: Sequence[int] | None = None,
        floor: float = -math.inf,
        scalarisation: Scalarisation | None = None,
        max_network_calls: int | None = None,
    ) -> None:
        options = SearchOptions(
            mode, lam, widening, min_visits, slots, trees, reward_batch, sync, explore, c_uct, kappa, branching, floor,
            scalarisation, max_network_calls,
        )  # fmt: skip
        chain = Chain(
            denoiser, scheduler, num_inference_steps=num_inference_steps, times=times, levels=levels, proposal=proposal,
            stages=stages, shape=shape, eta=eta, batch_size=batch_size,
        )  # fmt: skip
        self._set(chain, reward, options)

    @classmethod
    def on_chain(cls, chain: Any, reward: Reward, options: SearchOptions | None = None) -> TreeSearch:
        """A search of a chain that exists already: a :class:`Chain`, or an object with its methods."""
        search = cls.__new__(cls)
        search._set(chain, reward, options or SearchOptions())
        return search

    def _set(self, chain: Any, reward: Reward, options: SearchOptions) -> None:
        if not callable(reward):
            raise ConfigError(
                f"reward has type {type(reward).__name__}; expected a Reward (FunctionReward makes one of a function)"
            )
        if chain.leaf_depth > 127:
            raise ConfigError(f"the tree has {chain.leaf_depth} levels; expected at most 127: give fewer levels")
        least, limit = chain.first_step(chain.leaf_depth) * chain.calls_per_step, options.max_network_calls
        if limit is not None and limit < least:
            raise ConfigError(f"max_network_calls={limit}; expected at least {least}, what one rollout takes")
        self.chain, self.reward, self.options = chain, reward, options
        self.policy = options.policy(chain.leaf_depth)

    def run(
        self,
        num_rollouts: int,
        generator: torch.Generator | None = None,
        cond: Mapping[str, Tensor] | None = None,
        context: Mapping[str, Tensor] | None = None,
        reward_context: Mapping[str, Any] | None = None,
        save_dir: str | Path | None = None,
        resume: bool = False,
        save_every: int = 1000,
        progress: bool = False,
        callback: Callback | None = None,
    ) -> TreeResult:
        """Searches.

        Args:
            num_rollouts: rollouts of all trees together, at most. Each ends in a leaf: a new one, or (in a part of the
                tree that has all the children its visits allow) one that is there already, at no cost.
            generator: gives the search its key (one draw); None: torch's global generator, or the saved key.
            cond: what the denoiser is told, one row per tree or one for all.
            context: what the kernel needs, one row per tree or one for all.
            reward_context: the reward's own context, one row per tree or one for all.
            save_dir: folder for saves; None: none.
            resume: continue the search saved there, as if it had never stopped (``sync=True``: bit for bit).
            save_every: rollouts between saves.
            progress: show a progress bar.
            callback: called after each batch of judged leaves with a mapping of numbers (``rollouts``, ``leaves``,
                ``network_calls``, ``best``).

        Raises:
            ConfigError: arguments that do not fit, or a save of another search.
            CheckpointError: a save that is damaged from its beginning, or a full disk.
        """
        total = checked_count("num_rollouts", num_rollouts)
        checked_count("save_every", save_every)
        rows = [_checked_rows(n, v, self.options.trees) for n, v in (("cond", cond), ("context", context))]
        if resume and save_dir is None:
            raise ConfigError("resume=True needs save_dir=, the folder of the search to continue")
        device = _device_of(self.chain, *rows)
        key = None if generator is None and resume else int(draw_keys(generator, 1).key[0])
        state = _Run(self, total, key, rows[0], rows[1], reward_context, device)
        saver = None
        if save_dir is not None:
            saver = SearchSaver(save_dir, search_settings(self, total, rows[0], rows[1]))
            state.restore(saver.open(resume))
        with torch.no_grad():
            state.loop(saver, save_every, progress, callback)
        return state.result()


class _Run:
    """One run: the tree, the slots and the queue of the reward."""

    def __init__(
        self, search: TreeSearch, total: int, key: int | None, cond: Any, context: Any, judged_by: Any, device: Any
    ) -> None:
        self.search, self.chain, self.options, self.policy = search, search.chain, search.options, search.policy
        self.total, self.key, self.device = total, key, device
        self.cond, self.context, self.reward_context = cond, context, judged_by
        self.objectives: Scalarisation = search.options.scalarisation or SingleObjective()
        self.store = NodeStore(self.options.trees)
        slots = min(self.options.slots, total)
        self.sim = np.full(slots, -1, np.int64)  # -1: the slot is free
        self.node, self.step = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self.guided = torch.zeros(slots, dtype=torch.bool, device=device)
        self.log_ratio = torch.zeros(slots, dtype=torch.float64, device=device)
        self.state: Any = None
        self.queue: list[tuple[int, int]] = []  # (leaf, rollout) that wait for the reward
        self.asked: list[tuple[list[tuple[int, int]], Future[Judged]]] = []
        self.judged = LeafLog()
        self.counts = Counts()
        self.batch = self.options.reward_batch or max(1, self.options.slots // 4)
        self.saved_nodes, self.saved_leaves, self.saved_rollouts = self.options.trees, 0, 0
        self._first = np.array(
            [self.chain.first_step(max(d, self.chain.num_stages)) for d in range(self.chain.leaf_depth + 1)]
        )

    # --- the loop -------------------------------------------------------------------------------------------------

    def loop(self, saver: SearchSaver | None, save_every: int, progress: bool, callback: Callback | None) -> None:
        """Runs until every rollout has been judged; the last save is made at the end."""
        if self._is_over():
            return
        started, before = time.perf_counter(), self.counts.wall_seconds
        bar = _progress(self.total, self.counts.done, progress)
        pool = None if self.options.sync else ThreadPoolExecutor(1)
        try:
            while not self._is_over():
                self._refill()
                if (self.sim >= 0).any():
                    self._tick()
                done = self.counts.done
                self._judge_now() if pool is None else self._judge_beside(pool)
                self._learn_scale()
                self.counts.wall_seconds = before + time.perf_counter() - started
                bar.update(self.counts.done - bar.n)
                if callback is not None and self.counts.done > done:
                    callback(self._report())
                if saver is not None and self._save_is_due(save_every):
                    self._save(saver)
        finally:
            bar.close()
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    def _save_is_due(self, save_every: int) -> bool:
        return self.counts.done - self.saved_rollouts >= save_every or self._is_over()

    def _may_issue(self) -> bool:
        return self.counts.issued < self.total and not self.counts.out_of_calls

    def _is_over(self) -> bool:
        return self.counts.done == self.counts.issued and not self._may_issue()

    def _report(self) -> dict[str, Any]:
        return {
            "rollouts": self.counts.done,
            "leaves": self.judged.known,
            "network_calls": self.counts.network_calls,
            "best": self.judged.best.tolist(),
        }

    # --- selection ------------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Gives every free slot the next rollout; one that ends at a leaf of the tree costs nothing and is done."""
        while self._may_issue() and len(free := np.flatnonzero(self.sim < 0)):
            count = min(len(free), self.total - self.counts.issued)
            sims = np.arange(self.counts.issued, self.counts.issued + count)
            down = self._descend(sims)
            if (fits := self._affordable(down)) < count:
                down, sims, self.counts.out_of_calls = withdraw(self.store, down, fits), sims[:fits], True
            self.counts.issued += fits
            grows = down.expand
            back_up(self.store, down.node[~grows], self.policy.lam, self.options.floor)
            self.counts.done += int((~grows).sum())
            self.counts.revisits += int((~grows).sum())
            self._start(free[: int(grows.sum())], sims[grows], down.node[grows])

    def _descend(self, sims: Ints) -> Descent:
        roots = sims % self.options.trees
        if not self.objectives.ready:  # the scale is learned from independent draws of the chain
            return grow_at(self.store, roots)
        uniforms = select_uniforms(self._key(), sims, self.policy.leaf_depth)
        parameters = self.objectives.draw(self._keys(sims, cpu=True))
        return descend(self.store, self.policy, roots, uniforms, self.objectives, parameters)

    def _affordable(self, down: Descent) -> int:
        """How many rollouts, in their order, the limit of network calls has room for beside what busy slots owe."""
        limit, each = self.options.max_network_calls, self.chain.calls_per_step
        if limit is None:
            return len(down.node)
        steps = self._first[-1] - self._first[self.store.depth[down.node]]  # 0 at a leaf
        owed = self._first[-1] - self.step[self.sim >= 0]
        room = limit - self.counts.network_calls - each * int(owed.sum())
        return int(np.searchsorted(each * np.cumsum(steps), room, side="right"))

    def _start(self, slots: Ints, sims: Ints, node: Ints) -> None:
        """Puts rollouts that leave the tree at ``node`` into slots; the stages of the prior are drawn here."""
        if not len(slots):
            return
        node, chain = node.copy(), self.chain
        for stage in range(1, chain.num_stages + 1):
            rows = np.flatnonzero(self.store.depth[node] < stage)
            if len(rows):
                before = None if stage == 1 else self.store.state_of(node[rows])
                context = self._rows(self.context, sims[rows])
                drawn = chain.draw_stage(stage, before, self._keys(sims[rows]), context)
                weight = chain.stage_log_weight(stage, drawn, context).numpy()
                node[rows] = self.store.append(node[rows], np.full(len(rows), stage), weight, drawn)
        self.sim[slots], self.node[slots] = sims, node
        depth = self.store.depth[node].astype(np.int64)
        self.step[slots] = self._first[depth]
        self._place(slots, self.store.state_of(node))
        where = self._index(slots)
        self.log_ratio[where] = 0.0
        self.guided[where] = chain.draw_branch(self._keys(sims), torch.from_numpy(depth).to(self.device))

    def _place(self, slots: Ints, state: Any) -> None:
        if self.state is None:
            one = take(state, torch.zeros(len(self.sim), dtype=torch.int64, device=self.device))
            self.state = {n: v.clone() for n, v in one.items()} if isinstance(one, Mapping) else one.clone()
        put(self.state, self._index(slots), state)

    # --- denoising ------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """One micro-step of every busy slot."""
        busy = np.flatnonzero(self.sim >= 0)
        everyone = len(busy) == len(self.sim)
        index = self._index(busy)
        sims, step = self.sim[busy], torch.from_numpy(self.step[busy])
        state = self.state if everyone else take(self.state, index)
        keys, cond, context = self._keys(sims), self._rows(self.cond, sims), self._rows(self.context, sims)
        started = time.perf_counter()
        new, ratio = self.chain.step(state, step.to(self.device), self.guided[index], keys, cond, context)
        self.counts.network_seconds += time.perf_counter() - started
        self.counts.network_calls += len(busy) * self.chain.calls_per_step
        self.counts.ticks += 1
        self.log_ratio[index] += ratio
        if everyone:
            self.state = new
        else:
            put(self.state, index, new)
        self.step[busy] += 1
        reached = self.chain.depth_after(step).numpy()
        closing = np.flatnonzero(reached)
        if len(closing):
            self._close_edges(busy[closing], reached[closing], take(new, self._index(closing)))

    def _close_edges(self, slots: Ints, depth: Ints, state: Any) -> None:
        """Slots whose macro-edge has ended: their states become nodes, leaves leave their slots."""
        index, sims = self._index(slots), self.sim[slots]
        weight = self.chain.edge_log_weight(self.log_ratio[index]).cpu().numpy()
        self.node[slots] = self.store.append(self.node[slots], depth, weight, state)
        self.log_ratio[index] = 0.0
        leaf = depth == self.chain.leaf_depth
        self.queue += zip(self.node[slots[leaf]].tolist(), sims[leaf].tolist(), strict=True)
        self.sim[slots[leaf]] = -1
        if not leaf.all():
            on = slots[~leaf]
            where = torch.from_numpy(depth[~leaf]).to(self.device)
            self.guided[self._index(on)] = self.chain.draw_branch(self._keys(self.sim[on]), where)

    # --- rewards --------------------------------------------------------------------------------------------------

    def _judge_now(self) -> None:
        if self.queue and (len(self.queue) >= self.batch or not self._can_go_on()):
            leaves, self.queue = self.queue, []
            self._settle([self._ask(leaves[i : i + self.batch]) for i in range(0, len(leaves), self.batch)])

    def _judge_beside(self, pool: ThreadPoolExecutor) -> None:
        """The reward works in its own thread; hardly more leaves than slots wait for it."""
        stuck = not self._can_go_on()
        while self.queue and (len(self.queue) >= self.batch or stuck):
            part, self.queue = self.queue[: self.batch], self.queue[self.batch :]
            self.asked.append((part, pool.submit(self._ask, part)))
        waiting = sum(len(part) for part, _ in self.asked)
        if self.asked and (stuck or waiting > self.options.slots):
            wait([future for _, future in self.asked], return_when=FIRST_COMPLETED)
        ready = [future for _, future in self.asked if future.done()]
        self.asked = [(part, future) for part, future in self.asked if future not in ready]
        if ready:
            self._settle([future.result() for future in ready])

    def _can_go_on(self) -> bool:
        return bool((self.sim >= 0).any()) or self._may_issue()

    def _ask(self, leaves: list[tuple[int, int]]) -> Judged:
        node, simulation = np.array(leaves, np.int64).T
        return judge(self.search.reward, self.store.state_of(node), self._context_of(simulation), node, simulation)

    def _context_of(self, sims: Ints) -> Any:
        """The reward's context: tensors by tree, anything else as it is."""
        given = self.reward_context
        if given is None:
            return None
        return {k: self._rows({k: v}, sims)[k] if isinstance(v, Tensor) else v for k, v in given.items()}

    def _settle(self, batches: list[Judged]) -> None:
        """Books what the reward said and backs it up; what could not be judged gets the floor."""
        store = self.store
        for found in batches:
            self.judged.add(found)
            self._count(found)
        if self.judged.num_objectives:
            store.set_columns(self.objectives.num_columns(self.judged.num_objectives))
        for found in batches:
            store.values[found.node] = self._columns(found)
        back_up(store, np.concatenate([found.node for found in batches]), self.policy.lam, self.options.floor)
        self.counts.done += sum(len(found.node) for found in batches)
        if not isinstance(self.objectives, SingleObjective):
            for found in batches:
                if found.valid.any():
                    self.objectives = self.objectives.observe(torch.from_numpy(found.rewards[found.valid]))

    def _count(self, found: Judged) -> None:
        counts = self.counts
        counts.reward_calls += len(found.node)
        counts.raised += found.raised
        counts.not_finite += found.not_finite
        counts.reward_seconds += found.seconds
        counts.failures += found.failures[: max(0, 100 - len(counts.failures))]
        for name, count in found.logs.items():
            counts.reward_logs[name] = counts.reward_logs.get(name, 0) + count

    def _columns(self, found: Judged) -> Any:
        """The leaves' columns (B, K)."""
        columns = np.full((len(found.node), self.store.values.shape[1]), self.options.floor)
        if found.valid.any():
            own = self.objectives.columns(torch.from_numpy(found.rewards[found.valid])).numpy()
            columns[found.valid] = np.where(np.isnan(own), self.options.floor, own)
        return columns

    def _learn_scale(self) -> None:
        """Fits the objectives' scale to the first ``warm_up`` valid leaves by rollout, and makes all columns anew.

        It waits until no earlier rollout is under way, so the scale does not depend on the order of their ends. A
        search that is over before takes what there is.
        """
        if self.objectives.ready:
            return
        wanted = max(2, self.objectives.warm_up)
        least = 2 if self._is_over() else wanted
        if self.judged.valid_count < least:
            return
        leaves = self.judged.all()
        order = np.argsort(leaves.simulation)
        order = order[leaves.simulation[order] == np.arange(len(order))]  # up to the first rollout that is not judged
        rows = order[leaves.valid[order]][:wanted]
        if len(rows) < least:
            return
        self.objectives = self.objectives.fit(torch.from_numpy(leaves.rewards[rows]))
        self.store.values[leaves.node] = self._columns(leaves)
        self.store.dirty[leaves.node] = True
        renew_all(self.store, self.policy.lam, self.options.floor)

    # --- saving ---------------------------------------------------------------------------------------------------

    def _save(self, saver: SearchSaver) -> None:
        waiting = [leaf for part, _ in self.asked for leaf in part] + self.queue
        slots = {
            "sim": self.sim,
            "node": self.node,
            "step": self.step,
            "queue": np.array(waiting, np.int64).reshape(-1, 2),
        }
        slots |= {"guided": self.guided.cpu().numpy(), "log_ratio": self.log_ratio.cpu().numpy()}
        rows = self.state if isinstance(self.state, Mapping) else {"": self.state}
        groups = {
            "nodes": self.store.changes(self.saved_nodes),
            "slots": slots | {f"state.{name}": value for name, value in rows.items()},
            "leaves": self.judged.since(self.saved_leaves),
            "objectives": dict(self.objectives.state_dict()),
        }
        single = not isinstance(self.state, Mapping)
        saver.save(groups, {"key": str(self._key()), "single": single, "counts": asdict(self.counts)})
        self.store.saved()
        self.saved_nodes, self.saved_leaves = self.store.size, self.judged.known
        self.saved_rollouts = self.counts.done

    def restore(self, parts: list[SavedPart]) -> None:
        """Puts saved parts on top of one another; slots, queue and counters are those of the last."""
        if not parts:
            self.key = self._key() if self.key is not None else int(draw_keys(None, 1).key[0])
            return
        last = parts[-1]
        saved_key = int(last.meta["key"])
        if self.key is not None and self.key != saved_key:
            raise ConfigError(
                "the generator gives another key than the saved search has; give the same seed, or no generator"
            )
        self.key = saved_key
        slots = last.group("slots")
        rows = {n.removeprefix("state."): v.to(self.device) for n, v in slots.items() if n.startswith("state.")}
        self.state = rows[""] if last.meta["single"] else rows
        for part in parts:
            self.store.apply(_on(part.group("nodes"), self.device), take(self.state, slice(0, 0)))
            self.judged.restore(part.group("leaves"))
        self.sim, self.node, self.step = (slots[name].copy() for name in ("sim", "node", "step"))
        self.guided, self.log_ratio = (torch.from_numpy(slots[n]).to(self.device) for n in ("guided", "log_ratio"))
        self.queue = [(int(leaf), int(sim)) for leaf, sim in slots["queue"]]
        self.counts = Counts(**last.meta["counts"])
        self.objectives = self.objectives.restored(last.group("objectives"))
        self.saved_nodes, self.saved_leaves = self.store.size, self.judged.known
        self.saved_rollouts = self.counts.done

    # --- small things ---------------------------------------------------------------------------------------------

    def _key(self) -> int:
        if self.key is None:
            raise ConfigError("the search has no key: pass generator=")
        return self.key

    def _keys(self, sims: Ints, cpu: bool = False) -> Keys:
        sample = torch.from_numpy(sims)
        keys = Keys(torch.full_like(sample, self._key()), sample, torch.zeros((), dtype=torch.int64))
        return keys if cpu or self.device.type == "cpu" else keys.to(self.device)

    def _index(self, rows: Ints) -> Tensor:
        index = torch.from_numpy(rows)
        return index if self.device.type == "cpu" else index.to(self.device)

    def _rows(self, values: Any, sims: Ints) -> Any:
        """The rows of a condition or context that belong to rollouts, by their trees."""
        if values is None:
            return None
        single = row_count(values) == 1
        return take(values, self._index(np.zeros_like(sims) if single else sims % self.options.trees))

    def result(self) -> TreeResult:
        """What was found."""
        found = TreeResult(self.store, self.judged, self.policy, self.objectives, asdict(self.counts), self._key())
        found.warn_if_biased()
        return found


def _checked_rows(name: str, values: Any, trees: int) -> Any:
    """A condition or context with one row per tree, or one for all."""
    for key, value in (values or {}).items():
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) not in (1, trees):
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                f"{name}[{key!r}] has {shape}; expected a tensor with {trees} rows (one a tree) or with 1"
            )
    if len({len(value) for value in (values or {}).values()}) > 1:
        return {key: value.expand(trees, *value.shape[1:]) for key, value in values.items()}
    return dict(values) if values else None


def _device_of(chain: Any, cond: Any, context: Any) -> torch.device:
    denoiser = getattr(chain, "denoiser", None)
    parameters = denoiser.parameters() if isinstance(denoiser, nn.Module) else iter(())
    values = [*(cond or {}).values(), *(context or {}).values()]
    return next((value.device for value in (*parameters, *values)), torch.device("cpu"))


def _on(arrays: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arrays.items()}


def _progress(total: int, done: int, show: bool) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=total, initial=done, desc="tree search", disable=not show)
