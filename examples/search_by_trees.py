"""Trees of a search spread over processes, one device each: the archive is the same for any number of them.

    python examples/search_by_trees.py
    accelerate launch --num_processes 2 examples/search_by_trees.py

Trees are independent, so process i of n searches the trees i, i + n, …, each with its own key, and the leaves are
gathered by tree. ``--reward-processes 2`` spreads the rewards of one search over processes instead, with the same
result. The last line is a hash of the archive.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

import genkit
from genkit.metrics import ParetoArchive


def main() -> None:
    """Searches this process's trees and prints the archive of all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pipeline", default="zoo:proto8-crystal")
    parser.add_argument("--objectives", nargs=2, default=["stability", "scarcity"])
    parser.add_argument("--trees", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=128, help="of each tree")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--reward-processes", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    processes = PartialState()
    pipe = genkit.load(options.pipeline).to(processes.device)
    pipe.set_progress_bar_config(disable=True)
    found = []
    for tree in range(processes.process_index, options.trees, processes.num_processes):
        output = pipe(
            options.rollouts, 1, objectives=options.objectives, num_inference_steps=options.steps, slots=8,
            reward_processes=options.reward_processes, generator=torch.Generator().manual_seed(tree), output_type="pt",
        )  # fmt: skip
        found.append((tree, output.archive.values, output.archive.ids))
    everything = sorted(gather_object(found), key=lambda part: part[0])
    archive = ParetoArchive(2)
    for tree, values, ids in everything:
        archive.add(values, ids=options.rollouts * tree + ids)
    if processes.is_main_process:
        front = archive.values[archive.front]
        print(f"{len(archive)} leaves of {options.trees} trees, {len(front)} on the front")
        print(hashlib.sha256(archive.values.numpy().tobytes() + archive.ids.numpy().tobytes()).hexdigest())


if __name__ == "__main__":
    main()
