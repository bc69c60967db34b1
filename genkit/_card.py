"""The model card (README.md with YAML front matter) that every saved pipeline carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from genkit._components import check_names
from genkit.serialization import installed_versions

__all__ = ["CARD_FACTS", "render_card"]

#: Facts that a pipeline's ``model_card()`` may state; all are optional.
CARD_FACTS = (
    "command",  # str: what reproduces the weights
    "description",  # str: one paragraph
    "data",  # str: what it was trained on, with licence
    "license",  # str: SPDX identifier of the weights
    "limits",  # Sequence[str]
    "metrics",  # Mapping[str, float | str]: name (with n and setting) → value
    "pipeline_tag",  # str: a task of the hub
    "seed",  # int
    "tags",  # Sequence[str]
    "toy_scale",  # bool
    "training_config",  # Mapping
)


def render_card(class_name: str, facts: Mapping[str, Any]) -> str:
    """The card's text. ``facts`` has keys of `CARD_FACTS` only; unknown ones raise `ConfigError`."""
    check_names(facts, CARD_FACTS, what=f"{class_name}.model_card(): fact")
    header = {
        "license": facts.get("license", "apache-2.0"),
        "library_name": "genkit",
        "pipeline_tag": facts.get("pipeline_tag", "other"),
        "tags": list(facts.get("tags", ())) + ["genkit", "diffusers"],
        "toy_scale": bool(facts.get("toy_scale", False)),
    }
    parts = [f"---\n{_yaml(header)}---", f"# {class_name}", *_body(class_name, facts)]
    return "\n\n".join(parts) + "\n"


def _body(class_name: str, facts: Mapping[str, Any]) -> list[str]:
    parts = [str(facts.get("description", f"Weights of a genkit `{class_name}`."))]
    if facts.get("toy_scale"):
        parts.append("**Toy scale**: small networks and data, trained to check the method, not to compete with it.")
    parts.append('```python\nimport genkit\n\npipe = genkit.load("path/to/this/folder")\n```')
    parts += _section("Data", facts.get("data"))
    parts += _section("Results", _metrics(facts.get("metrics")))
    parts += _section("Limits", _bullets(facts.get("limits")))
    parts += _section("Training", _training(facts))
    return parts + _section("Versions", _bullets([f"{k} {v}" for k, v in installed_versions().items()]))


def _section(title: str, text: Any) -> list[str]:
    return [f"## {title}", str(text)] if text else []


def _bullets(lines: Sequence[str] | None) -> str:
    return "\n".join(f"- {line}" for line in lines or ())


def _metrics(metrics: Mapping[str, Any] | None) -> str:
    rows = [f"| {name} | {value} |" for name, value in (metrics or {}).items()]
    return "\n".join(["| metric | value |", "|---|---|", *rows]) if rows else ""


def _training(facts: Mapping[str, Any]) -> str:
    lines = []
    if "command" in facts:
        lines.append(f"```\n{facts['command']}\n```")
    if "seed" in facts:
        lines.append(f"Seed {facts['seed']}.")
    if facts.get("training_config"):
        lines.append(f"```yaml\n{_yaml(dict(facts['training_config']))}```")
    return "\n\n".join(lines)


def _yaml(value: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True)
    return text
