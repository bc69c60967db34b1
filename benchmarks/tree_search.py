"""What a tree search costs beside the network and the reward that it asks, one thread.

Engine: the cost of a node (time and memory) with a chain that costs next to nothing, for trees of 1e4, 1e5 and 1e6
nodes. Goals: 1e6 nodes cost at most 1.5 x as much a node as 1e4, and at most 400 bytes each.

Model: a randomly initialised network of about 10 ms a call at 64 rows, or any pipeline's parts given to `model_rows`
(``mlp_``), and the zoo's crystal model with its energies:

* ``search_vs_plain_batched``: wall time of a search / of plain sampling with as many network calls and rewards in
  batches of as many rows as the search has slots;
* ``share_outside_network_and_reward``: of the search's wall time (1 would be all of it);
* ``speedup_vs_one_slot``: a search with 64 slots against one slot at a time, beside the network's own 64 t(1) / t(64).

Run: ``python benchmarks/tree_search.py [--largest 1000000]`` (minutes on one core; ``--largest 100000`` half of one).
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _bench import Ratio, bench_line, info_line, interleaved, keep_memory, one_thread, ratio

from genkit.rewards import FunctionReward
from genkit.samplers import Keys, SearchOptions, TreeSearch
from genkit.schedulers import VPScheduler

SIZES = (10_000, 100_000, 1_000_000)
LEVELS, SLOTS, STEPS = 8, 64, 16


# --- the engine -------------------------------------------------------------------------------------------------------


class CheapChain:
    """A chain of 8 edges whose states (B, 4) only change sign: what is left is the engine."""

    num_stages, calls_per_step, leaf_depth, num_steps = 1, 1, LEVELS + 1, LEVELS

    def first_step(self, depth: int) -> int:
        return depth - 1

    def depth_after(self, step: Tensor) -> Tensor:
        return step + 2

    def draw_stage(self, depth: int, state: Any, keys: Keys, context: Any = None) -> Tensor:
        return keys.uniform((4,), torch.float32)

    def stage_log_weight(self, depth: int, state: Any, context: Any = None) -> Tensor:
        return torch.zeros(len(state), dtype=torch.float64)

    def draw_branch(self, keys: Keys, depth: Tensor) -> Tensor:
        return torch.zeros(len(keys), dtype=torch.bool)

    def edge_log_weight(self, log_ratio: Tensor) -> Tensor:
        return log_ratio

    def step(self, state: Tensor, step: Tensor, guided: Tensor, keys: Keys, *_: Any) -> tuple[Tensor, Tensor]:
        return -state, torch.zeros(len(state), dtype=torch.float64)


def node_cost(nodes: int) -> tuple[float, float]:
    """Processor seconds and bytes a node, of a search that ends with about so many nodes."""
    reward = FunctionReward(lambda x, context: x[:, 0])
    search = TreeSearch.on_chain(CheapChain(), reward, SearchOptions(slots=256, lam=1.0))
    start = time.process_time()
    found = search.run(nodes // (LEVELS + 1), torch.Generator().manual_seed(0))
    seconds = time.process_time() - start
    return seconds / found.store.size, found.store.nbytes / found.store.size


def node_rows(largest: int) -> list[str]:
    """The rows of the engine; times are relative to the smallest tree."""
    node_cost(2000)  # the first calls of everything
    lines, smallest = [], 0.0
    for nodes in (size for size in SIZES if size <= largest):
        times, memory = zip(*(node_cost(nodes) for _ in range(3 if nodes == SIZES[0] else 1)), strict=True)
        seconds = min(times)
        smallest = smallest or seconds
        name, one = f"node_cost_1e{len(str(nodes)) - 1}", Ratio(*[seconds / smallest] * 3, len(times))
        print(f"{name}: {1e6 * seconds:.1f} us and {memory[0]:.0f} bytes a node", flush=True)
        note = f"({1e6 * seconds:.1f} us a node; relative to 1e4)"
        lines.append(bench_line(name, one, "<=1.5") if nodes == SIZES[-1] else info_line(name, one, note))
        room = Ratio(*[memory[0] / 400.0] * 3, 1)
        lines.append(bench_line(f"{name}_bytes_over_400", room, "<=1"))
    return lines


# --- a model ----------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """(B, 64) and times (B,) → (B, 64); about 10 ms at 64 rows."""

    def __init__(self, width: int = 2400) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(65, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 64)
        )

    def forward(self, x: Tensor, t: Tensor, cond: object = None) -> Tensor:
        return self.layers(torch.cat((x, t[:, None]), dim=1))


def model_rows(
    denoiser: Any, scheduler: Any, reward: Any, shape: Any, rollouts: int = 256, repeats: int = 3
) -> list[str]:
    """The rows of a model.

    Args:
        denoiser: (x_t, t, cond) → model output.
        scheduler: a chain with a stochastic kernel.
        reward: judges clean samples.
        shape: the shape of one sample (a dict of them for states with parts).
        rollouts: rollouts of a search.
        repeats: interleaved repeats.
    """

    def search(slots: int, count: int) -> Any:
        options = {"num_inference_steps": STEPS, "levels": LEVELS, "shape": shape, "lam": 1.0}
        tree = TreeSearch(denoiser, scheduler, reward, slots=slots, reward_batch=SLOTS, **options)
        return tree.run(count, torch.Generator().manual_seed(0))

    reference = search(SLOTS, rollouts)
    plain = plain_sampling(
        search_chain(denoiser, scheduler, shape), reward, reference.network_calls, len(reference.leaves)
    )
    seconds = interleaved({"search": lambda: search(SLOTS, rollouts), "plain": plain}, repeats, warmup=1)
    shares = []
    for _ in range(repeats):
        spent = search(SLOTS, rollouts).seconds
        shares.append(spent["own"] / sum(spent.values()))
    shares.sort()
    few = max(SLOTS // 8, 1)
    start = time.perf_counter()
    search(1, few)
    alone = (time.perf_counter() - start) / few
    speedups = sorted(alone * rollouts / wall for wall in seconds["search"])
    chain = search_chain(denoiser, scheduler, shape)
    single, full = forward_seconds(chain, 1), forward_seconds(chain, SLOTS)
    bare = SLOTS * single / full
    print(f"bare forward: {1e3 * single:.2f} ms with one row, {1e3 * full:.2f} ms with {SLOTS}", flush=True)
    middle = len(speedups) // 2
    speedup = Ratio(speedups[middle], speedups[0], speedups[-1], len(speedups))
    return [
        bench_line("mlp_search_vs_plain_batched", ratio(seconds["search"], seconds["plain"]), "<=1.1"),
        bench_line(
            "mlp_share_outside_network_and_reward", Ratio(shares[middle], shares[0], shares[-1], repeats), "<=0.05"
        ),
        info_line("mlp_speedup_vs_one_slot", speedup, f"(bare network {SLOTS} t(1) / t({SLOTS}) = {bare:.2f})"),
    ]


def search_chain(denoiser: Any, scheduler: Any, shape: Any) -> Any:
    """The chain that the searches of `model_rows` walk."""
    from genkit.samplers import Chain

    return Chain(denoiser, scheduler, num_inference_steps=STEPS, levels=LEVELS, shape=shape)


def plain_sampling(chain: Any, reward: Any, calls: int, leaves: int) -> Callable[[], object]:
    """Independent walks in batches of ``SLOTS`` with as many calls, and rewards of as many samples."""

    def run() -> None:
        left, judged, sample = calls, 0, 0
        while left > 0:
            rows = min(SLOTS, max(1, left // chain.num_steps))
            keys = Keys(torch.zeros(rows, dtype=torch.int64), sample + torch.arange(rows), torch.zeros((), dtype=int))
            state = chain.draw_stage(1, None, keys)
            for step in range(min(chain.num_steps, -(-left // rows))):
                state, _ = chain.step(state, torch.full((rows,), step), None, keys)
                left -= rows
            sample += rows
            while judged < leaves * (calls - left) // calls:
                part = min(rows, leaves - judged)
                reward(state if part == rows else _first(state, part), None)
                judged += part

    return run


def _first(state: Any, rows: int) -> Any:
    return {k: v[:rows] for k, v in state.items()} if isinstance(state, dict) else state[:rows]


@torch.no_grad()
def forward_seconds(chain: Any, rows: int) -> float:
    """The best of ten bare calls of the network."""
    keys = Keys(torch.zeros(rows, dtype=torch.int64), torch.arange(rows), torch.zeros((), dtype=torch.int64))
    state, step = chain.draw_stage(1, None, keys), torch.full((rows,), 1)
    return min(interleaved({"forward": lambda: chain.outputs(state, step)}, 10)["forward"])


def crystal_rows(repeats: int = 3, samples: int = 256) -> list[str]:
    """The zoo's crystal model with its energies: a search beside independent walks (self-normalised weights) that make
    as many network calls and, within a few per cent, judge as many crystals.
    """
    import genkit

    pipe: Any = genkit.load("zoo:proto8-crystal")
    pipe.set_progress_bar_config(disable=True)
    steps, shares, counts = 32, [], []
    settings = {"num_inference_steps": steps, "output_type": "pt", "lam": 10.0}

    def search(slots: int = SLOTS, walks: int = samples) -> dict[str, float]:
        found = pipe(
            8 * walks, 4, levels=8, widening=(2.0, 0.5), max_network_calls=walks * steps, slots=slots,
            generator=torch.Generator().manual_seed(0), **settings,
        )  # fmt: skip
        spent: dict[str, float] = found.diagnostics["seconds"]
        shares.append(spent["own"] / sum(spent.values()))
        counts.append((found.diagnostics["network_calls"], found.diagnostics["reward_calls"]))
        return spent

    def plain(slots: int = SLOTS, walks: int = samples) -> dict[str, float]:
        generator = torch.Generator().manual_seed(0)
        found = pipe(walks, 4, mode="snis", slots=slots, generator=generator, **settings)
        counts.append((found.diagnostics["network_calls"], found.diagnostics["reward_calls"]))
        spent: dict[str, float] = found.diagnostics["seconds"]
        return spent

    seconds = interleaved({"search": search, "plain": plain}, repeats, warmup=1)
    (calls, rewards), (plain_calls, plain_rewards) = counts[0], counts[1]
    print(f"crystals: {calls} calls, {rewards} energies; plain {plain_calls} and {plain_rewards}", flush=True)
    ordered = sorted(shares[1:])
    one, all_slots = (sum(search(slots, walks).values()) / walks for slots, walks in ((1, 8), (SLOTS, samples)))
    bare_one, bare_all = (plain(slots, walks)["network"] / walks for slots, walks in ((1, 8), (SLOTS, samples)))
    speedup = Ratio(*[one / all_slots] * 3, 1)
    return [
        info_line("speedup_vs_one_slot", speedup, f"(the network alone: {bare_one / bare_all:.2f})"),
        bench_line("search_vs_plain_batched", ratio(seconds["search"], seconds["plain"]), "<=1.1"),
        bench_line(
            "share_outside_network_and_reward",
            Ratio(ordered[len(ordered) // 2], ordered[0], ordered[-1], len(ordered)),
            "<=0.05",
        ),
    ]


def main() -> None:
    """Prints all rows; the BENCH lines come last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="nodes of the largest tree")
    arguments = parser.parse_args()
    one_thread()
    keep_memory()
    logging.getLogger("genkit.samplers").setLevel(logging.ERROR)
    lines = node_rows(arguments.largest)
    torch.manual_seed(0)
    reward = FunctionReward(lambda x, context: -x.square().mean(dim=1))
    lines += model_rows(MLP().eval(), VPScheduler("cosine", prediction_type="sample"), reward, (64,))
    lines += crystal_rows()
    for line in sorted(lines, key=lambda line: line.startswith("BENCH")):
        print(line)


if __name__ == "__main__":
    main()
