"""The house rules, read off the source: import arrows, no pickle, documented public names, short files.

Each rule is a function from a source tree to the list of its violations (``file:line: what is wrong``). The project's
tree must give an empty list, and a seeded tree must not: a rule that never fires proves nothing.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 600
MAX_MEDIAN_LINES = 12

# Inside genkit a folder imports only from those after it.
LAYERS = ("training", "samplers", "rewards", "metrics", "models", "schedulers", "data")
ENTRY_POINTS = {"__init__", "cli", "train"}  # the top: they may import anything
TOP_MODULES = {"cli", "train"}  # nothing imports these; every other module at the root (and zoo) is open to all

BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
BANNED_CALLS = {"torch.load", "torch.save", "yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle"}
BANNED_BUILTINS = {"eval", "exec"}
BANNED_METHODS = {"save_state", "load_state", "register_for_checkpointing"}  # accelerate's: they pickle
GLOBAL_RNG_CALLS = {
    *(f"torch.{name}" for name in ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial")),
    *(f"torch.{name}_like" for name in ("rand", "randn", "randint")),
}
BANNED_RNG = re.compile(r"^(numpy|np)\.random\.(?!default_rng|Generator|SeedSequence|PCG64|Philox)|^random\.\w+$")


def python_files(root: Path, *folders: str) -> Iterator[Path]:
    """Python files of the named folders of a tree, in order."""
    for folder in folders:
        yield from sorted(p for p in (root / folder).rglob("*.py") if "__pycache__" not in p.parts)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(root: Path, path: Path) -> str:
    """The import name of a file: ``pipelines/x/y.py`` is ``genkit.pipelines.x.y``; a package ends in ``__init__``."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    return ".".join(["genkit", *parts] if parts[0] == "pipelines" else parts)


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an attribute chain; an empty string for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def imports(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted target) of every import, wherever it stands; also of literal ``import_module`` calls.

    ``from a import b`` yields ``a.b``: whether b is a module or a name, its first two parts say which folder it is in.
    """
    package = module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ("import_module", "__import__"):
            if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def owner(name: str) -> tuple[str, str]:
    """(kind, which) of a dotted name inside genkit: pipeline / layer / shared / entry."""
    parts = name.split(".")
    head = parts[1] if len(parts) > 1 else "__init__"
    if head == "pipelines":
        return "pipeline", parts[2] if len(parts) > 2 else "__init__"
    if head in LAYERS:
        return "layer", head
    return ("entry", head) if head in ENTRY_POINTS else ("shared", head)


def arrow_error(source: str, target: str) -> str:
    """Why module ``source`` may not import ``target``, or an empty string."""
    if target.split(".")[0] == "pipelines":
        return "the folder pipelines/ is imported as genkit.pipelines"
    if target.split(".")[0] != "genkit":
        return ""
    (kind, which), (target_kind, target_which) = owner(source), owner(target)
    if target_kind == "pipeline":
        if kind == "pipeline" and (which == "__init__" or which == target_which):
            return ""
        if kind == "entry" and which == "__init__":
            return ""
        return "a pipeline never imports another" if kind == "pipeline" else "the core never imports a pipeline"
    if kind == "entry":
        return ""
    if target_kind == "entry" and target_which in TOP_MODULES:
        return "nothing imports the entry points genkit.cli and genkit.train"
    if kind == "shared" and target_kind == "layer":
        return "a module that every folder may use imports none of them"
    if kind == target_kind == "layer" and LAYERS.index(target_which) < LAYERS.index(which):
        return f"a folder imports only from those after it in: {', '.join(LAYERS)}"
    return ""


def arrow_violations(root: Path) -> list[str]:
    """Imports that run against the arrows."""
    found = []
    for path in python_files(root, "genkit", "pipelines"):
        source = module_name(root, path)
        for line, target in imports(source, parse(path)):
            reason = arrow_error(source, target)
            if reason:
                found.append(f"{path.relative_to(root)}:{line}: imports {target}: {reason}")
    return found


def top_level_pipelines(root: Path) -> list[str]:
    """Imports of a top-level package ``pipelines``, which is never installed."""
    return [
        f"{path.relative_to(root)}:{line}: imports {target}"
        for path in python_files(root, "genkit", "pipelines", "examples", "benchmarks", "tests")
        for line, target in imports(module_name(root, path), parse(path))
        if target.split(".")[0] == "pipelines"
    ]


def safe_loaders(tree: ast.Module) -> set[str]:
    """The safe YAML loaders, and a module's own subclasses of them."""
    safe = {"yaml.SafeLoader", "yaml.CSafeLoader"}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return safe | {c.name for c in classes if any(dotted(base) in safe for base in c.bases)}


def unsafe_call(node: ast.Call, loaders: set[str]) -> str:
    """What is wrong with a call, or an empty string; ``loaders`` are those that yaml.load may use."""
    name = dotted(node.func)
    keywords = {keyword.arg for keyword in node.keywords}
    if name in BANNED_CALLS or name in BANNED_BUILTINS or name.split(".")[-1] in BANNED_METHODS:
        return f"{name}(…)"
    if name == "yaml.load" and not any(k.arg == "Loader" and dotted(k.value) in loaders for k in node.keywords):
        return "yaml.load(…) without a safe loader"
    if "allow_pickle" in keywords:
        return f"{name}(allow_pickle=…)"
    if name in GLOBAL_RNG_CALLS and "generator" not in keywords:
        return f"{name}(…) draws from the global generator"
    return f"{name}(…) draws from a global generator" if BANNED_RNG.match(name) else ""


def safety_violations(root: Path) -> list[str]:
    """Pickle, torch.load, eval, and draws from a global generator."""
    found = []
    for path in python_files(root, "genkit", "pipelines"):
        tree, where = parse(path), path.relative_to(root)
        for line, target in imports(module_name(root, path), tree):
            if target.split(".")[0] in BANNED_MODULES:
                found.append(f"{where}:{line}: imports {target}")
        loaders = safe_loaders(tree)
        calls = ((node.lineno, unsafe_call(node, loaders)) for node in ast.walk(tree) if isinstance(node, ast.Call))
        found += [f"{where}:{line}: {what}" for line, what in calls if what]
    return found


def assigned_names(tree: ast.Module) -> set[str]:
    """Names assigned at the top of a module, tuple targets included."""
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def public_names(tree: ast.Module) -> list[str]:
    """The strings of a literal ``__all__``; empty when it is computed."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [e.value for e in getattr(node.value, "elts", []) if isinstance(e, ast.Constant)]
    return []


def public_name_violations(root: Path) -> list[str]:
    """Modules without docstring or ``__all__``; public classes, functions and methods without docstring."""
    found = []
    for path in python_files(root, "genkit", "pipelines"):
        tree, where = parse(path), path.relative_to(root)
        if not ast.get_docstring(tree):
            found.append(f"{where}:1: the module has no docstring")
        if "__all__" not in assigned_names(tree) and path.name != "__main__.py":
            found.append(f"{where}:1: the module has no __all__")
        names = set(public_names(tree))
        for node in tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in names and not ast.get_docstring(node):
                found.append(f"{where}:{node.lineno}: {node.name} is public and has no docstring")
    return found


def undefined_names(root: Path) -> list[str]:
    """Names in a literal ``__all__`` that the module does not define (packages define theirs lazily)."""
    found = []
    for path in python_files(root, "genkit", "pipelines"):
        tree = parse(path)
        definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        defined = assigned_names(tree) | {node.name for node in tree.body if isinstance(node, definitions)}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                defined |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        missing = sorted(set(public_names(tree)) - defined)
        found += [f"{path.relative_to(root)}:1: __all__ names {name!r}, which is not defined" for name in missing]
    return found


def long_files(root: Path) -> list[str]:
    """Files above the limit."""
    files = python_files(root, "genkit", "pipelines", "tests", "benchmarks", "examples")
    counted = ((path, len(path.read_text(encoding="utf-8").splitlines())) for path in files)
    return [
        f"{path.relative_to(root)}: {lines} lines, at most {MAX_LINES}" for path, lines in counted if lines > MAX_LINES
    ]


def function_lengths(root: Path) -> list[int]:
    """Lines of each function of the library, its docstring not counted."""
    lengths = []
    for path in python_files(root, "genkit", "pipelines"):
        for node in ast.walk(parse(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
                first = node.body[0]
                documented = ast.get_docstring(node) is not None and first.end_lineno is not None
                docstring = first.end_lineno - first.lineno + 1 if documented else 0
                lengths.append(node.end_lineno - node.lineno + 1 - docstring)
    return lengths


RULES: list[Callable[[Path], list[str]]] = [
    arrow_violations,
    top_level_pipelines,
    safety_violations,
    public_name_violations,
    undefined_names,
    long_files,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Callable[[Path], list[str]]) -> None:
    violations = rule(ROOT)
    assert not violations, f"{rule.__doc__}\n" + "\n".join(violations)


CLEAN = '"""Doc."""\n\n__all__: list[str] = []\n'
SEEDED = {
    "an upward import": (arrow_violations, "genkit/data/x.py", "from genkit.training import Trainer", "data/x.py:4"),
    "a relative one": (arrow_violations, "genkit/models/x.py", "from ..samplers import rollout", "genkit.samplers"),
    "inside a function": (arrow_violations, "genkit/metrics/x.py", "def f():\n    import genkit.rewards", ":5"),
    "core to pipeline": (
        arrow_violations,
        "genkit/samplers/x.py",
        "from genkit.pipelines import rmmd",
        "the core never",
    ),
    "by name": (arrow_violations, "genkit/zoo/x.py", "f = import_module('genkit.pipelines.rmmd')", "the core never"),
    "pipeline to pipeline": (arrow_violations, "pipelines/a/x.py", "from genkit.pipelines.b import y", "another"),
    "pipeline to pipeline, relative": (arrow_violations, "pipelines/a/x.py", "from ..b import y", "pipelines.b.y"),
    "to the command line": (arrow_violations, "pipelines/a/x.py", "from genkit.cli import main", "entry points"),
    "a shared module upward": (arrow_violations, "genkit/errors.py", "import genkit.data", "imports none"),
    "top-level pipelines": (top_level_pipelines, "examples/x.py", "import pipelines.a", "imports pipelines.a"),
    "pickle": (safety_violations, "genkit/x.py", "import pickle", "imports pickle"),
    "torch.load": (safety_violations, "genkit/x.py", "torch.load(p)", "torch.load"),
    "allow_pickle": (safety_violations, "genkit/x.py", "np.load(p, allow_pickle=True)", "allow_pickle"),
    "eval": (safety_violations, "pipelines/a/x.py", "eval(text)", "eval"),
    "unsafe yaml": (safety_violations, "genkit/x.py", "yaml.load(text)", "yaml.load"),
    "unsafe yaml loader": (safety_violations, "genkit/x.py", "yaml.load(t, Loader=yaml.Loader)", "yaml.load"),
    "pickling checkpoints": (safety_violations, "genkit/x.py", "accelerator.save_state(p)", "save_state"),
    "global torch generator": (safety_violations, "genkit/x.py", "torch.randn(3)", "global generator"),
    "global numpy generator": (safety_violations, "genkit/x.py", "np.random.normal()", "global generator"),
    "no docstring": (public_name_violations, "genkit/x.py", "def f(): ...\n__all__ = ['f']", "f is public"),
    "a name that is not there": (undefined_names, "genkit/x.py", "__all__ = ['gone']", "gone"),
    "a long file": (long_files, "tests/x.py", "\n" * MAX_LINES, "at most"),
}


@pytest.mark.parametrize("case", SEEDED)
def test_a_seeded_violation_is_caught(case: str, tmp_path: Path) -> None:
    rule, name, line, expected = SEEDED[case]
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(CLEAN + line + "\n", encoding="utf-8")
    violations = rule(tmp_path)
    assert len(violations) == 1, violations
    assert expected in violations[0]


ALLOWED = {
    "genkit/samplers/x.py": "from genkit.schedulers import FlowScheduler\nfrom genkit.errors import ConfigError",
    "genkit/training/x.py": "from .config import TrainerConfig\nfrom genkit.samplers.noise import training_keys",
    "pipelines/a/x.py": "from genkit.training import Objective\nfrom .b import c\nfrom genkit.pipelines.a import z",
    "genkit/cli.py": "from genkit.registry import method_module\nimport genkit.training",
    "genkit/z.py": "class L(yaml.SafeLoader): ...\nyaml.load(text, Loader=L)",
    "genkit/y.py": "torch.randn(3, generator=g)\nnp.random.default_rng(0)\nmodel.eval()\nyaml.safe_load(t)",
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed_passes(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(CLEAN + ALLOWED[name] + "\n", encoding="utf-8")
    assert not [violation for rule in RULES for violation in rule(tmp_path)]


def test_functions_are_short() -> None:
    lengths = function_lengths(ROOT)
    assert lengths and statistics.median(lengths) <= MAX_MEDIAN_LINES, f"median {statistics.median(lengths)} lines"


def test_folders_do_not_clash_with_diffusers_pipelines() -> None:
    """diffusers records a component of ``genkit.wan.net`` as its own pipeline ``wan`` and then fails to load it."""
    spec = importlib.util.find_spec("diffusers")
    assert spec is not None and spec.submodule_search_locations
    theirs = {p.name for p in (Path(spec.submodule_search_locations[0]) / "pipelines").iterdir() if p.is_dir()}
    assert "wan" in theirs, "diffusers has moved its pipelines: this test looks in the wrong place"
    ours = {p.parent.name for p in python_files(ROOT, "genkit", "pipelines")}
    assert not (ours & theirs - {"__pycache__"}), f"folders named as in diffusers.pipelines: {sorted(ours & theirs)}"
