"""Derive flags from a tree of frozen dataclasses, and build the tree from flags, a TOML file and a preset.

A flag overrides the file, the file the preset, and the preset the default. This module imports nothing heavy, so that
`--help` and a mistyped flag answer at once.
"""

import argparse
import dataclasses
import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Tree = TypeVar("Tree")
Preset = Mapping[str, Any]
METAVARS = {bool: "BOOL", int: "N", float: "X", str: "TEXT"}


def parse_flags(
    tree: type[Tree],
    arguments: Sequence[str],
    *,
    program: str,
    description: str,
    presets: Mapping[str, Preset] | None = None,
    find_problem: Callable[[Tree], str | None] = lambda _: None,
    defaults: Preset | None = None,
) -> Tree:
    """Read flags such as `--model.depth 6`; invalid values exit with code 2.

    `defaults` override those of the tree, by dotted name. A dash in a name is read as an underscore.
    `--config FILE.toml` has a table for each part of the tree and may name a `preset`.
    """
    presets, defaults = presets or {}, defaults or {}
    _check_defaults(tree, defaults)
    parser = make_parser(tree, program, description, presets, defaults)
    namespace, unknown = parser.parse_known_args([_read_dashes(argument) for argument in arguments])
    if unknown:
        parser.error(_explain_unknown(unknown[0], tree))
    given = vars(namespace)
    try:
        file = given.pop("config", None)
        from_file = read_config_file(Path(file), tree, accepts_preset=bool(presets)) if file else {}
        preset_name = given.pop("preset", None) or from_file.pop("preset", None)
        if preset_name and preset_name not in presets:
            raise ValueError(f"unknown preset `{preset_name}`; known: {', '.join(presets)}")
        preset = presets[preset_name] if preset_name else {}
    except ValueError as error:
        parser.error(str(error))
    config: Tree = _build(tree, {**defaults, **preset, **from_file, **given}, "")
    problem = find_problem(config)
    if problem:
        parser.error(problem)
    return config


def make_parser(
    tree: type, program: str, description: str, presets: Mapping[str, Preset], defaults: Preset | None = None
) -> argparse.ArgumentParser:
    """Return a parser with one flag per setting, grouped like the tree. A flag that is not given sets no attribute."""
    # No abbreviations: one that is unique today becomes ambiguous with the next flag.
    parser = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s [--FLAG VALUE ...]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with a table per group below; flags override it")
    if presets:
        parser.add_argument(
            "--preset", metavar="NAME", help=f"a set of initial values; --config overrides it: {', '.join(presets)}"
        )
    groups: dict[str, argparse._ArgumentGroup] = {}
    sections = {f"{part.name}.": part.type for part in dataclasses.fields(tree)}
    for name, knob_field in iterate_knobs(tree):
        prefix = name[: name.rfind(".") + 1]
        if prefix not in groups:
            about = (sections[prefix].__doc__ or "").strip() if prefix in sections else ""
            groups[prefix] = parser.add_argument_group(f"{prefix}*" if prefix else "the run", about or None)
        default, choices = (defaults or {}).get(name, knob_field.default), knob_field.metadata["choices"]
        action = groups[prefix].add_argument(
            f"--{name}",
            type=_READERS[type(default)],
            choices=choices or None,
            metavar="|".join(choices) if choices else METAVARS[type(default)],
            help=f"{knob_field.metadata['help']} (default: {default!r})".replace("%", "%%"),
        )
        if isinstance(default, bool):  # `--compile` alone means true
            action.nargs, action.const = "?", True
    return parser


def _read_dashes(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name[:2] + name[2:].replace("-", "_") + equals + value if name.startswith("--") else argument


def _check_defaults(tree: type, defaults: Preset) -> None:
    knobs = dict(iterate_knobs(tree))
    for name, value in defaults.items():
        if name not in knobs or type(value) is not type(knobs[name].default):
            raise ValueError(f"`{name}`={value!r} is not a default of a flag{_suggest(name, knobs)}")


def read_config_file(path: Path, tree: type, *, accepts_preset: bool = False) -> dict[str, Any]:
    """Return the values of a TOML file by dotted name. Raises ValueError for an unknown name or a wrong type."""
    try:
        content = _read_toml(path)
    except OSError as error:
        raise ValueError(f"cannot read `{path}`: {error.strerror}") from error
    values = {}
    knobs = dict(iterate_knobs(tree))
    for name, value in _flatten(content, ""):
        if name == "preset" and accepts_preset:
            values[name] = value
            continue
        if name not in knobs:
            raise ValueError(f"`{path}`: `{name}` is unknown{_suggest(name, knobs)}")
        values[name] = _check_value(f"`{path}`: `{name}`", value, knobs[name])
    return values


def _read_toml(path: Path) -> dict[str, Any]:
    """Parse with tomllib (Python 3.11 and later), or on 3.10 with tomli or the copy of it inside pip."""
    for name in ("tomllib", "tomli", "pip._vendor.tomli"):
        try:
            library = importlib.import_module(name)
        except ImportError:
            continue
        with path.open("rb") as file:
            try:
                content: dict[str, Any] = library.load(file)
            except library.TOMLDecodeError as error:
                raise ValueError(f"`{path}` is not valid TOML: {error}") from error
        return content
    raise ValueError(f"`{path}` cannot be read on Python 3.10 without the package tomli: `pip install tomli`")


def to_arguments(config: Any) -> list[str]:
    """Return a config as flags that parse to an equal one."""
    return [f"--{name}={value}" for name, value in to_values(config).items()]


def to_values(config: Any) -> dict[str, Any]:
    """Return every leaf value of a config by dotted name."""
    values = {}
    for name, _ in iterate_knobs(type(config)):
        value = config
        for part in name.split("."):
            value = getattr(value, part)
        values[name] = value
    return values


def iterate_knobs(tree: type, prefix: str = "") -> Iterator[tuple[str, "dataclasses.Field[Any]"]]:
    """Yield every leaf of the tree as dotted name and field: its own fields first, then those of each part."""
    fields = dataclasses.fields(tree)
    for member in fields:
        if not dataclasses.is_dataclass(member.type):
            yield f"{prefix}{member.name}", member
    for member in fields:
        if dataclasses.is_dataclass(member.type):
            assert isinstance(member.type, type)
            yield from iterate_knobs(member.type, f"{prefix}{member.name}.")


def _build(tree: Any, values: Mapping[str, Any], prefix: str) -> Any:
    parts = {}
    for member in dataclasses.fields(tree):
        name = f"{prefix}{member.name}"
        if dataclasses.is_dataclass(member.type):
            parts[member.name] = _build(member.type, values, f"{name}.")
        elif name in values:
            parts[member.name] = values[name]
    return tree(**parts)


def _flatten(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_value(place: str, value: Any, knob_field: "dataclasses.Field[Any]") -> Any:
    wanted = type(knob_field.default)
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise ValueError(f"{place} must be {_KINDS[wanted]}, not {value!r}")
    choices = knob_field.metadata["choices"]
    if choices and value not in choices:
        raise ValueError(f"{place} must be one of {', '.join(choices)}, not {value!r}")
    return value


def _explain_unknown(argument: str, tree: type) -> str:
    name = argument.lstrip("-").partition("=")[0]
    if not argument.startswith("-"):
        return f"`{argument}` does not belong to a flag"
    return f"unknown flag `--{name}`{_suggest(name, dict(iterate_knobs(tree)), '--')}"


def _suggest(name: str, names: Mapping[str, Any], sign: str = "") -> str:
    near = difflib.get_close_matches(name, names, n=1)
    # A name without its group refers to the setting with that last name.
    near = near or [name_known for name_known in names if name_known.rpartition(".")[2] == name.rpartition(".")[2]]
    return f"; did you mean `{sign}{near[0]}`?" if near else ""


def _read_bool(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"`{text}` is not true or false")
    return words[text.lower()]


_READERS: dict[type, Callable[[str], Any]] = {bool: _read_bool, int: int, float: float, str: str}
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
