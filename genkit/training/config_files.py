"""Reading configuration: a YAML file, ``key=value`` overrides, and errors that name file, key and nearest key.

YAML is read by the 1.2 core rules: ``1e-4`` is a number and ``no`` is a word (1.1 makes them a word and a boolean). A
key given twice is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from genkit.errors import ConfigError, nearest
from genkit.training.config import SCHEMA_VERSION, TrainerConfig

__all__ = ["apply_overrides", "changed_keys", "load_config", "parse_config", "read_yaml"]

Config = TypeVar("Config", bound=BaseModel)
COMMAND_LINE = "command line"


# --- YAML -------------------------------------------------------------------------------------------------------------


class _CoreLoader(yaml.SafeLoader):
    """SafeLoader with the scalar rules of YAML 1.2 and unique keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [k.value for k, _ in node.value if k.tag != "tag:yaml.org,2002:merge"]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep=deep)


for _kind, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("null", r"~|null|Null|NULL", "~nN"),
    ("merge", r"<<", "<"),
):
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), list(_first))
_CoreLoader.yaml_implicit_resolvers[""] = [("tag:yaml.org,2002:null", re.compile(r"^$"))]


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_CoreLoader)  # noqa: S506  # a SafeLoader subclass: plain values only
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}, line {mark.line + 1}" if mark else source
        raise ConfigError(f"{where}: not valid YAML ({getattr(error, 'problem', None) or error})") from error


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; a missing, empty, unreadable or differently shaped file is a `ConfigError`."""
    path = Path(path)
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise ConfigError(f"{path}: no such configuration file.{nearest(path.name, siblings)}")
    try:
        value = _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    if value is None:
        raise ConfigError(f"{path}: the file is empty; it must hold keys such as 'method: heavy_tailed_flow'")
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a {type(value).__name__}, expected a mapping of keys to values")
    return value


# --- overrides --------------------------------------------------------------------------------------------------------


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """``values`` with ``key=value`` texts applied: dotted keys reach into parts, values are YAML."""
    result = _copied(values)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(
                f"{COMMAND_LINE}: {text!r} is not of the form key=value (for example max_steps=100 or data.name=x)"
            )
        *parents, last = key.split(".")
        part = result
        for depth, name in enumerate(parents):
            part = part.setdefault(name, {})
            if not isinstance(part, dict):
                raise ConfigError(
                    f"{COMMAND_LINE}: {key}: {'.'.join(parents[: depth + 1])} is {part!r}, which has no keys inside"
                )
        part[last] = _parse(value, f"{COMMAND_LINE}: {key}")
    return result


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copied(v) for k, v in value.items()}
    return [_copied(v) for v in value] if isinstance(value, list) else value


# --- validation -------------------------------------------------------------------------------------------------------


def load_config(path: str | Path, overrides: Sequence[str] = (), model: type[Config] | None = None) -> Config:
    """The validated configuration of a YAML file with overrides.

    Args:
        path: the YAML file.
        overrides: ``key=value`` texts; dotted keys reach into parts.
        model: the configuration class; by default the ``Config`` of the method that the file names.

    Raises:
        ConfigError: naming the file (or the command line), the key path and the nearest known key.
    """
    values = apply_overrides(read_yaml(path), overrides)
    if model is None:
        model = _model_of_method(values, str(path))
    return parse_config(model, values, source=str(path), overridden=[o.partition("=")[0] for o in overrides])


def _model_of_method(values: Mapping[str, Any], source: str) -> type[Any]:
    from genkit.registry import method_module

    method = values.get("method")
    if not isinstance(method, str) or not method:
        close = next((nearest(k, ["method"]) for k in values if nearest(k, ["method"])), "")
        raise ConfigError(
            f"{source}: method: got {method!r}, expected the name of a method, e.g. heavy_tailed_flow.{close}"
        )
    try:
        return method_module(method, "config").Config  # type: ignore[no-any-return]
    except ConfigError as error:
        raise ConfigError(f"{source}: method: {error}") from error


def parse_config(
    model: type[Config], values: Mapping[str, Any], *, source: str, overridden: Sequence[str] = ()
) -> Config:
    """``values`` as a ``model``; every problem is listed in one `ConfigError`."""
    _check_keys(values, source)
    version = values.get("schema_version", SCHEMA_VERSION)
    if issubclass(model, TrainerConfig) and version != SCHEMA_VERSION:
        raise ConfigError(
            f"{source}: schema_version: got {version!r}, this genkit reads {SCHEMA_VERSION}; rewrite the file for it "
            f"or use the genkit version that it was written for"
        )
    try:  # JSON rules: as strict, and a list may fill a tuple
        return model.model_validate_json(json.dumps(values))
    except TypeError as error:
        raise ConfigError(f"{source}: holds a value that is not plain data ({error})") from error
    except ValidationError as error:
        raise ConfigError("\n".join(_messages(model, values, error, source, overridden))) from error


def _check_keys(values: Any, where: str) -> None:
    """Refuses keys that are no text, at any depth: JSON would make them text, and no message could find them."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            if not isinstance(key, str):
                shown = "null" if key is None else repr(key)
                raise ConfigError(
                    f"{where}: the key {shown} ({type(key).__name__}) is no name; keys are words: mend it"
                )
            _check_keys(value, f"{where}: {key}")
    elif isinstance(values, list):
        for value in values:
            _check_keys(value, where)


def _messages(
    model: type[BaseModel], values: Mapping[str, Any], error: ValidationError, source: str, overridden: Sequence[str]
) -> list[str]:
    """One line per key path; the alternatives of a union share theirs."""
    found: dict[str, list[str]] = {}
    for item in error.errors(include_url=False):
        path = _key_path(item["loc"], values, missing=item["type"] == "missing")
        key = ".".join(path)
        if item["type"] == "extra_forbidden":
            text = f"unknown key.{nearest(path[-1], _names_at(model, path[:-1]))}"
        elif item["type"] == "missing":
            text = "the key is missing"
        elif isinstance(item["input"], Mapping):  # a rule between keys: it names them
            text = _plain(item["msg"], item["input"])
        else:
            text = f"got {item['input']!r} ({type(item['input']).__name__}): {_plain(item['msg'], item['input'])}"
        found.setdefault(key, []).append(text)
    where = {k: COMMAND_LINE if any(k == o or k.startswith(f"{o}.") for o in overridden) else source for k in found}
    return [f"{where[k]}: {k or 'the file'}: {' or '.join(dict.fromkeys(texts))}" for k, texts in found.items()]


def _plain(message: str, value: Any) -> str:
    message = message.replace("Input should be", "expected").replace("Value error, ", "")
    if isinstance(value, str) and re.search(r"boolean|integer|number", message):
        message += " (types are not converted: write it without quotes, booleans as true or false)"
    return message


def _key_path(location: Sequence[str | int], values: Any, missing: bool) -> list[str]:
    """The keys of a location: pydantic also puts the names of union members there, which are not in the data."""
    path: list[str] = []
    for part in location:
        if isinstance(values, Mapping) and part in values:
            values = values[part]
        elif isinstance(values, list) and isinstance(part, int) and part < len(values):
            values = values[part]
        else:
            continue
        path.append(str(part))
    return [*path, str(location[-1])] if missing else path


def _names_at(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The keys that exist at a key path of a model."""
    models: list[type[BaseModel]] = [model]
    for part in path:
        models = [
            m
            for parent in models
            if part in parent.model_fields
            for m in _models_in(parent.model_fields[part].annotation)
        ]
    return [name for m in models for name in m.model_fields]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


# --- resume -----------------------------------------------------------------------------------------------------------


def changed_keys(saved: Mapping[str, Any], now: TrainerConfig) -> list[str]:
    """Keys that may not change on resume but did, with both values; keys younger than ``saved`` count as default."""
    try:
        before = _flat(parse_config(type(now), saved, source="the checkpoint's configuration").resolved())
    except ConfigError as error:
        raise ConfigError(f"{error}\nThe checkpoint was written with another set of keys; start a new run.") from error
    after = _flat(now.resolved())
    names = sorted(k for k in before.keys() | after.keys() if k.split(".")[0] not in now.free_on_resume)
    absent = object()
    return [
        f"{k}: {before.get(k, 'absent')!r} in the checkpoint, {after.get(k, 'absent')!r} now"
        for k in names
        if before.get(k, absent) != after.get(k, absent)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            result |= _flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result
