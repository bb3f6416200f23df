# SPDX-License-Identifier: Apache-2.0
"""Flags, environment and file for any configuration model; the model is the only place that knows the fields.

A field `kv_cache_bytes` of the command `prefill` is

    --kv-cache-bytes 1000000            a flag
    DELTASERVE_PREFILL_KV_CACHE_BYTES   an environment variable
    {"prefill": {"kv_cache_bytes": …}}  in the file that --config names

A field of a nested model carries the nested model's name in front: `--etcd-endpoints`. Flags win over the environment,
the environment over the file, the file over the default. Lists are written with commas or as JSON, dictionaries as
JSON. Values are parsed by pydantic alone, so that all three ways accept and refuse the same.
"""

from __future__ import annotations

import argparse
import difflib
import json
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from deltaserve.documents import parse_json

ENV_PREFIX = "DELTASERVE"
CONFIG_FLAG = "--config"
LONGEST_SHOWN = 200
"""Characters of a refused value that an error repeats."""

Model = TypeVar("Model", bound=BaseModel)


class OptionError(Exception):
    """A value that cannot be used. The message names the option, where the value came from, and the remedy."""


@dataclass(frozen=True)
class Option:
    """One field of a configuration model, as the command line sees it."""

    path: tuple[str, ...]
    """Field names from the outermost model inwards, e.g. ("etcd", "endpoints")."""
    flag: str
    env: str
    field: FieldInfo

    @property
    def annotation(self) -> Any:
        """The field's type without `None`."""
        return _without_none(self.field.annotation)

    @property
    def positional(self) -> bool:
        """True for a value that is given without a flag; `flag` is its name then."""
        return not self.flag.startswith("-")

    @property
    def is_bool(self) -> bool:
        """True for a switch that has a --no- form."""
        return self.annotation is bool

    @property
    def container(self) -> type | None:
        """list or dict for a field that holds several values, else None."""
        origin = get_origin(self.annotation)
        return origin if origin in (list, dict) else None

    def decode(self, text: str) -> object:
        """The value for pydantic from the text of a flag or variable. Raises ValueError for JSON that is none."""
        if self.container is dict or (self.container is list and text.lstrip().startswith("[")):
            return parse_json(text)
        if self.container is list:
            return [part.strip() for part in text.split(",") if part.strip()]
        if text == "" and _allows_none(self.field.annotation):
            return None
        return text

    def encode(self, value: object) -> list[str]:
        """The arguments that give `value`; the inverse of parsing."""
        if self.positional:
            return [str(value)]
        if self.is_bool:
            return [self.flag if value else self.flag.replace("--", "--no-", 1)]
        if self.container is not None:
            return [f"{self.flag}={json.dumps(value, default=str)}"]
        return [f"{self.flag}={'' if value is None else value}"]


def options_of(model: type[BaseModel], command: str) -> list[Option]:
    """The options of `model` under the name of a command, nested models flattened, in the order of the fields."""
    return list(_walk(model, command, ()))


def _walk(model: type[BaseModel], command: str, outer: tuple[str, ...]) -> Iterator[Option]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        path = (*outer, name)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _walk(inner, command, path)
            continue
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        flag = str(extra.get("flag", "--" + "-".join(path).replace("_", "-")))
        if extra.get("positional"):
            flag = "-".join(path).upper()
        env = "_".join([ENV_PREFIX, command, *flag.removeprefix("--").split("-")]).upper()
        yield Option(path, flag, env, field)


def add_options(
    parser: argparse.ArgumentParser,
    model: type[BaseModel],
    command: str,
    hidden: frozenset[str] = frozenset(),
) -> None:
    """Give `parser` a flag for every field; top-level fields in `hidden` are set by the command itself."""
    parser.add_argument(CONFIG_FLAG, metavar="FILE", help=f'JSON file; its object "{command}" gives fields')
    for option in options_of(model, command):
        if option.path[0] in hidden:
            continue
        if option.positional:
            parser.add_argument(
                ".".join(option.path),
                nargs="?",
                default=argparse.SUPPRESS,
                metavar=option.flag,
                help=_help(option),
            )
            continue
        parser.add_argument(
            option.flag,
            dest=".".join(option.path),
            default=argparse.SUPPRESS,
            help=_help(option),
            **_argument(option),
        )


def _argument(option: Option) -> dict[str, Any]:
    if option.is_bool:
        return {"action": argparse.BooleanOptionalAction}
    choices = get_args(option.annotation) if get_origin(option.annotation) is Literal else ()
    if choices:
        return {"metavar": "{" + ",".join(map(str, choices)) + "}"}
    return {"metavar": _metavar(option)}


def _metavar(option: Option) -> str:
    if option.container is dict:
        return "JSON"
    if option.container is list:
        return "A,B,…"
    return {int: "N", float: "X", Path: "PATH"}.get(option.annotation, "TEXT")


def _help(option: Option) -> str:
    default = option.field.get_default(call_default_factory=True)
    if option.field.is_required():
        return f"{option.field.description} (required; {option.env})".replace("%", "%%")
    if isinstance(default, list):
        shown = ",".join(map(str, default))
    elif default in ("", None, {}):
        shown = "empty"
    elif isinstance(default, bool):
        shown = "on" if default else "off"
    else:
        shown = str(default)
    return f"{option.field.description} (default: {shown}; {option.env})".replace("%", "%%")


def load(
    model: type[Model],
    command: str,
    namespace: argparse.Namespace,
    environ: Mapping[str, str],
    fixed: Mapping[str, object] | None = None,
    sections: Collection[str] = (),
) -> Model:
    """The configuration from flags, environment and file; `fixed` fields are the command's own and win over all.

    `sections` names the commands that the file may be for; empty: it is not asked.

    Raises OptionError for an unreadable file, an unknown name, or a value that the model refuses.
    """
    options = options_of(model, command)
    values: dict[str, Any] = {}
    sources: dict[tuple[str, ...], str] = {}
    file = getattr(namespace, "config", None)
    if file:
        section = _read_file(Path(file), command, sections)
        _merge(values, section)
        sources.update({path: f'"{".".join(path)}" in {file}' for path in _paths(section, options)})
    _refuse_unknown_variables(options, command, environ)
    for option in options:
        if option.env in environ:
            _set(values, option.path, _decode(option, environ[option.env], option.env))
            sources[option.path] = option.env
    given = vars(namespace)
    for option in options:
        key = ".".join(option.path)
        if key in given:
            raw = given[key]
            _set(values, option.path, raw if option.is_bool else _decode(option, raw, option.flag))
            sources[option.path] = option.flag
    for name, value in (fixed or {}).items():
        _set(values, (name,), value)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise OptionError(_explain(error, options, sources, command)) from error


def to_argv(config: BaseModel, command: str, hidden: frozenset[str] = frozenset()) -> list[str]:
    """The flags that give the fields which `config` was made with (its `model_fields_set`), nested ones too."""
    argv: list[str] = []
    for option in options_of(type(config), command):
        holder: Any = config
        for name in option.path[:-1]:
            holder = getattr(holder, name)
        if option.path[0] in hidden or option.path[-1] not in holder.model_fields_set:
            continue
        argv += option.encode(getattr(holder, option.path[-1]))
    return argv


def _decode(option: Option, text: str, source: str) -> object:
    try:
        return option.decode(text)
    except ValueError as error:
        raise OptionError(
            f"{source}: {text!r} is not JSON ({error}); quote it as in {source}='{{…}}'"
        ) from error


def _read_file(path: Path, command: str, sections: Collection[str]) -> dict[str, Any]:
    try:
        document = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{CONFIG_FLAG} {path}: {error.strerror}; name a readable JSON file") from error
    except ValueError as error:
        raise OptionError(f"{CONFIG_FLAG} {path}: not JSON ({error})") from error
    if not isinstance(document, dict):
        raise OptionError(f'{CONFIG_FLAG} {path}: must be a JSON object such as {{"{command}": {{…}}}}')
    for name in document:
        if sections and name not in sections:
            near = difflib.get_close_matches(name, sections, 1)
            remedy = f"did you mean {near[0]}?" if near else f'fields belong into {{"{command}": {{…}}}}'
            raise OptionError(f'{CONFIG_FLAG} {path}: "{name}" is no command; {remedy}')
    section = document.get(command, {})
    if not isinstance(section, dict):
        raise OptionError(f'{CONFIG_FLAG} {path}: "{command}" must be an object of fields')
    return section


def _refuse_unknown_variables(options: Sequence[Option], command: str, environ: Mapping[str, str]) -> None:
    prefix = f"{ENV_PREFIX}_{command}_".upper()
    known = {option.env for option in options}
    for name in sorted(environ):
        if name.startswith(prefix) and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]}?" if near else f"see deltaserve {command} --help"
            raise OptionError(f"{name}: no such option of {command}; {remedy}")


def _explain(
    error: ValidationError, options: Sequence[Option], sources: Mapping[tuple[str, ...], str], command: str
) -> str:
    lines = []
    for item in error.errors(include_url=False):
        location = tuple(str(part) for part in item["loc"])
        option = next((o for o in options if location[: len(o.path)] == o.path), None)
        message = item["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(".".join(location), [".".join(o.path) for o in options], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            lines.append(f'"{".".join(location)}": no such field of {command}{hint}')
        elif option is None:
            lines.append(f'"{".".join(location)}": {message}' if location else message)
        else:
            source = sources.get(option.path, option.flag)
            got = "" if item["type"] == "missing" else f", got {_shown(item['input'])}"
            lines.append(f"{source}: {message}{got} ({option.field.description})")
    return "; ".join(lines)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def _set(values: dict[str, Any], path: Sequence[str], value: object) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
    values[path[-1]] = value


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for name, value in other.items():
        into[name] = dict(value) if isinstance(value, dict) else value


def _paths(section: Mapping[str, Any], options: Sequence[Option]) -> Iterator[tuple[str, ...]]:
    for option in options:
        holder: Any = section
        for name in option.path:
            holder = holder.get(name, _MISSING) if isinstance(holder, dict) else _MISSING
        if holder is not _MISSING:
            yield option.path


_MISSING = object()


def _allows_none(annotation: Any) -> bool:
    return type(None) in get_args(annotation)


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (typing.Union, types.UnionType):
        rest = [part for part in get_args(annotation) if part is not type(None)]
        return rest[0] if len(rest) == 1 else annotation
    return annotation
