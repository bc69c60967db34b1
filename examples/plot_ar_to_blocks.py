"""
From next tokens to blocks
==========================

A small language model learns two tasks token by token: copy a word, write it backwards. Then the same weights learn to
write blocks of tokens at once, with blocks that grow from 2 to 8, while a next-token loss keeps what they know. All of
it is trained here, in about a minute on one CPU core. Toy scale: 100,000 parameters.

Run it as ``python examples/plot_ar_to_blocks.py --out out/ar_to_blocks``.
"""

# %%
# One configuration, two phases
# -----------------------------
# The keys are those of ``configs/block_diffusion/*.yaml``. ``pretraining`` steps train the autoregressive model, at
# three times the learning rate; the rest adapts it.
import argparse
import copy
import tempfile
from pathlib import Path

import genkit
from genkit.data import VerifiableTasks
from genkit.data.tasks import check_answer
from genkit.metrics.text import wilson_interval
from genkit.pipelines.block_diffusion import BlockDiffusionPipeline, Config
from genkit.pipelines.block_diffusion.config import build, build_model
from genkit.pipelines.block_diffusion.evaluate import answer_problems
from genkit.pipelines.block_diffusion.plots import draw_adaptation
from genkit.plotting import figure_style, save_figure
from genkit.training import Trainer

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=None, help="folder for the pictures (default: none are written)")
out = parser.parse_known_args()[0].out

folder = tempfile.TemporaryDirectory()
config = Config.model_validate(
    {
        "output_dir": folder.name,
        "data": {"name": "tasks", "tasks": ["copy", "reverse"]},
        "model": {"name": "small", "layers": 2, "width": 64, "heads": 4, "max_length": 64},
        "pretraining": {"steps": 400, "learning_rate_factor": 3.0},
        "diffusion": {"block_length": 8, "ar_weight": 0.5},
        "max_steps": 800,
        "batch_size": 64,
        "learning_rate": 1e-3,
        "lr_scheduler": "cosine",
        "warmup_steps": 30,
        "max_grad_norm": 1.0,
        "save_steps": 800,
        "progress": False,
        "report_to": "none",
    }
)

# %%
# Training
# --------
# ``Trainer.train()`` yields a log entry after every step. When the first phase ends, a copy of the weights is kept: it
# is the autoregressive model that adaptation starts from.
recipe = build(config)
tokenizer = build_model(config)[1]
network = recipe.objective.networks()["model"].model
log, base = [], None
for entry in Trainer(recipe.objective, config, recipe.data, recipe.save_pipeline).train():
    log.append(entry)
    if entry.step == config.pretraining.steps:
        base = BlockDiffusionPipeline.from_ar(copy.deepcopy(network), tokenizer, block_length=8)
adapted = genkit.load(Path(folder.name) / "pipeline")
print(f"{len(log)} steps in {sum(entry.seconds for entry in log):.0f} s")

# %%
# Both losses jump when blocks begin and when they grow, and recover. The next-token loss of the clean path is the one
# to watch for what the model might forget: it ends about where pretraining had left it.
with figure_style():
    curves = draw_adaptation(log)
if out is not None:
    print(save_figure(curves, out / "adaptation.png", seed=config.seed, note="mean of 25 steps"))

# %%
# Before and after
# ----------------
# Test problems that training never sees. At block length 1 both models write token by token. At 8, all tokens whose
# probability is above 0.9 become known together; the base was never shown a mask and fails.
held_out = VerifiableTasks(config.data.tasks, num_samples=300, split="test")
problems = [held_out.problem(i) for i in range(len(held_out))]
print(f"{'weights':22s} {'block':>5s} {'exact match (95 %)':>24s} {'tokens per call':>16s}   n = {len(problems)}")
for name, pipe in (("autoregressive base", base), ("adapted to blocks", adapted)):
    pipe.set_progress_bar_config(disable=True)
    for block_length in (1, 8):
        texts, per_call = answer_problems(pipe, problems, block_length=block_length, threshold=0.9)
        right = sum(check_answer(prompt, text) for (prompt, _), text in zip(problems, texts, strict=True))
        share = wilson_interval(right, len(problems))
        interval = f"{share.value:.3f} [{share.low:.3f}, {share.high:.3f}]"
        print(f"{name:22s} {block_length:5d} {interval:>24s} {float(per_call.mean()):16.2f}")
folder.cleanup()
