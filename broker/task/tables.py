"""Tables of fields: a mapping of the task file with known keys, each with its shape and description."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from broker.task.reading import Reader, describe, suggest
from broker.task.shapes import Schema, Shape, allow_null, suggest_mapping
from broker.task.yaml_reader import Marked

_LISTED_MAX = 12  # fields in a hint
_OCTAL = "0+[1-7][0-7]+"  # in YAML 1.1


class Later:
    """The notice for a field that is accepted but not supported. `{value}` in the message is the value written."""

    def __init__(
        self,
        *,
        message: str,
        hint: str | None = None,
        blocks_launch: bool = True,
        applies: Callable[[Any], bool] = bool,
    ) -> None:
        self.message = message
        self.hint = hint
        self.blocks_launch = blocks_launch
        self.applies = applies


class Field:
    """One key: its shape, and its description for editors and the reference. `at`: clouds that do not support it.

    `is_blank_none`: empty text counts as no value.
    """

    def __init__(
        self,
        *,
        shape: Shape,
        about: str,
        later: Later | None = None,
        at: Mapping[str, Later] | None = None,
        alias_of: str | None = None,
        is_required: bool = False,
        is_blank_none: bool = False,
        examples: Sequence[Any] = (),
    ) -> None:
        self.shape = shape
        self.about = about
        self.later = later
        self.at = at or {}
        self.alias_of = alias_of
        self.is_required = is_required
        self.is_blank_none = is_blank_none
        self.examples = examples


class Section:
    """A parsed table: typed values by field; fields that are missing, null or invalid are absent."""

    def __init__(self, *, marked: Marked, values: Mapping[str, Any], marks: Mapping[str, Marked]) -> None:
        self.marked = marked
        self.values = values
        self.marks = marks

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, or the default if it is absent."""
        return self.values.get(name, default)

    def find_key(self, name: str) -> tuple[int, int]:
        """Return line and column of the key or one of its aliases."""
        return next(
            (place for key, place in self.marked.keys.items() if self.marks.get(name) is self.marked.value[key])
        )


class Table(Shape):
    """A mapping with known keys.

    `exclusive` lists mutually exclusive pairs, `retired` the replacements of old keys, and `elsewhere` the place of
    keys that belong to another table. `others` is the notice for unknown keys; None refuses them. `bare` is the field
    that is probably meant by text in place of the mapping.
    """

    expected = "a mapping"

    def __init__(
        self,
        *,
        name: str,
        fields: Mapping[str, Field],
        exclusive: Sequence[tuple[str, str, str]] = (),
        retired: Mapping[str, str] | None = None,
        elsewhere: Mapping[str, str] | None = None,
        others: Later | None = None,
        bare: str | None = None,
        about: str = "",
    ) -> None:
        self.name = name
        self.fields = fields
        self.exclusive = exclusive
        self.retired = retired or {}
        self.elsewhere = elsewhere or {}
        self.others = others
        self.bare = bare
        self.about = about

    def admits_kind(self, value: Any) -> bool:
        return isinstance(value, dict)

    def read(self, reader: Reader, marked: Marked, name: str) -> Section | None:
        if not isinstance(marked.value, dict):
            reader.fault(marked, f"{self._show(name)} must be a mapping, not {describe(marked)}", self._hint(marked))
            return None
        self._check_keys(reader, marked, name)
        values: dict[str, Any] = {}
        marks: dict[str, Marked] = {}
        for key, each in marked.value.items():
            entry = self.fields.get(key)
            if entry is None or each.value is None or (entry.is_blank_none and each.value == ""):
                continue
            canonical = entry.alias_of or key
            marks[canonical] = each
            known = len(reader.issues)
            value = entry.shape.read(reader, each, key)
            if entry.examples:
                reader.add_hint(known, each, f"for example `{key}: {_show_example(entry.examples[0])}`")
            if value is not None:
                values[canonical] = value
                self._warn(reader, marked.keys[key], key, value)
                if each.is_plain and isinstance(each.value, int) and re.fullmatch(_OCTAL, each.text):
                    message = f"`{key}: {each.text}` is read as {each.value}; SkyPilot reads it as {int(each.text, 8)}"
                    reader.warn(marked.keys[key], key, message, "write it without leading zeros", blocks_launch=False)
        return Section(marked=marked, values=values, marks=marks)

    def _hint(self, marked: Marked) -> str | None:
        """Return a hint for writing the mapping if a field was written in its place."""
        text = marked.value if isinstance(marked.value, str) else ""
        is_field = text.partition(":")[0].strip() in self.fields
        if self.bare and text and " " not in text and not is_field:
            return f"write `{self.bare}: {text[:40]}`"
        return suggest_mapping(marked)

    def _warn(self, reader: Reader, place: tuple[int, int], key: str, value: Any) -> None:
        """Report fields that are not supported, on all clouds or on one."""
        entry = self.fields[key]
        laters: list[tuple[str | None, Later]] = [(None, entry.later)] if entry.later else []
        for cloud, later in [*laters, *entry.at.items()]:
            if later.applies(value):
                where = f" on {cloud}" if cloud else ""
                reader.warn(
                    place,
                    key,
                    f"`{key}`{where}: {later.message}",
                    later.hint,
                    blocks_launch=later.blocks_launch,
                    cloud=cloud,
                )

    def _check_keys(self, reader: Reader, marked: Marked, name: str) -> None:
        given = marked.value
        for key in given:
            if key not in self.fields and not reader.is_full:
                what = f"unknown field {describe(key)}" if key else "a field without a name"
                message = f"{what} in {self._show(name)}"
                if noted := self.others:
                    message = f"{message}: {noted.message}"
                    reader.warn(marked.keys[key], name, message, self._suggest(key), blocks_launch=noted.blocks_launch)
                else:
                    reader.note(*marked.keys[key], message, self._suggest(key))
        for first, second, hint in self._list_exclusive():
            if first in given and second in given:
                later = max(first, second, key=lambda key: marked.keys[key])
                reader.note(*marked.keys[later], f"`{first}` and `{second}` are mutually exclusive", hint)
        for key, entry in self.fields.items():
            if entry.is_required and (key not in given or given[key].value is None):
                example = f"for example `{key}: {entry.examples[0]}`" if entry.examples else None
                reader.fault(marked, f"{self._show(name)} requires `{key}`", example)

    def _suggest(self, key: str) -> str | None:
        """Return a hint for an unknown key: an odd space in it, its replacement, its place, or a near miss."""
        if not key.isascii() and any(each.isspace() and each != " " for each in key):
            return "replace the non-breaking space in the indentation by plain spaces"
        if hint := self.retired.get(key) or self.elsewhere.get(key):
            return hint
        if key.startswith("x-"):
            return "define the anchor where its value is used first: there are no fields for extensions"
        known = [each for each in self.fields if each[0] != "_"]
        listed = (
            f"its fields: {', '.join(known)}" if len(known) <= _LISTED_MAX else "docs/TASK_FILE.md lists all fields"
        )
        return suggest(key, known) or listed

    def _list_exclusive(self) -> list[tuple[str, str, str]]:
        aliases = [
            (key, entry.alias_of, f"keep `{entry.alias_of}`") for key, entry in self.fields.items() if entry.alias_of
        ]
        return [*self.exclusive, *aliases]

    def _show(self, name: str) -> str:
        return f"`{name}`" if name else "the task"

    def describe(self) -> Schema:
        return {"$ref": f"#/$defs/{self.name}"}

    def describe_fully(self) -> Schema:
        """Return the definition that `describe` refers to."""
        schema: Schema = {
            "type": "object",
            "title": self.name.replace("_", " "),
            "description": self.about,
            "additionalProperties": self.others is not None,
            "properties": {key: _describe_field(entry) for key, entry in self.fields.items()},
        }
        if needed := [key for key, entry in self.fields.items() if entry.is_required]:
            schema["required"] = needed
        if pairs := self._list_exclusive():
            schema["allOf"] = [{"not": {"required": [first, second]}} for first, second, _ in pairs]
        return schema


def _show_example(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else json.dumps(value)
        if isinstance(value, (dict, list))
        else str(value)
    )


def _describe_field(entry: Field) -> Schema:
    shape = entry.shape.describe()
    if entry.is_blank_none:
        shape = {"anyOf": [shape, {"const": ""}]}
    schema: Schema = {**(shape if entry.is_required else allow_null(shape)), "description": entry.about}
    if entry.later:
        schema["description"] += f" (Not supported: {entry.later.message}.)"
    if entry.at:
        schema["description"] += f" (Not supported on {', '.join(entry.at)}.)"
    if entry.alias_of:
        schema["deprecated"] = True
    if entry.examples:
        schema["examples"] = list(entry.examples)
    return schema
