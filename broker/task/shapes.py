"""Shapes of values in a task file: each parses a value, and describes itself as JSON Schema.

One table of fields made of these shapes defines the file format, for both the loader and `broker schema`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from broker.task.allowed import SCRIPT, Rule
from broker.task.reading import Reader, describe, suggest
from broker.task.yaml_errors import suggest_colon
from broker.task.yaml_reader import Marked, read_plain

# No dataclasses in the tables: each would cost every command that reads a task 0.4 ms, 8 ms in total.
Schema = dict[str, Any]
_CURLY = ("\u201c", "\u201d", "\u201e", "\u2018", "\u2019")
_NOT_HERE = "write the value: variables are substituted only in `workdir`, `file_mounts`, `volumes` and `service`"


def is_number(value: Any) -> bool:
    """Return whether a value read from YAML is a number; booleans are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Shape:
    """The form of a value. `expected` completes the message "`cpus` must be ..."."""

    expected: str = ""

    def admits_kind(self, value: Any) -> bool:
        """Return whether the value has the right kind (text, mapping, ...), valid or not."""
        raise NotImplementedError

    def read(self, reader: Reader, marked: Marked, name: str) -> Any:
        """Return the typed value, or None with issues reported. Never called for null."""
        raise NotImplementedError

    def describe(self) -> Schema:
        """Return the JSON Schema of the values that `read` accepts."""
        raise NotImplementedError


class Scalar(Shape):
    """A single word or number: `parse` returns the typed value, or None if it is invalid."""

    def parse(self, marked: Marked) -> Any:
        """Return the converted value; None if the value is invalid."""
        raise NotImplementedError

    def hint(self, marked: Marked) -> str | None:
        """Return a hint for correcting an invalid value; None if there is none."""
        return None

    def admits_kind(self, value: Any) -> bool:
        """Return whether the value's YAML type fits this shape; `Either` uses this to choose its message."""
        return isinstance(value, str)

    def read(self, reader: Reader, marked: Marked, name: str) -> Any:
        """Return the converted value, or report a fault with a hint and return None."""
        value = None if isinstance(marked.value, (dict, list)) else self.parse(marked)
        if value is None:
            is_quoted = self._is_needlessly_quoted(marked)
            shown = f"the text {describe(marked)}" if is_quoted else describe(marked)
            hint = "remove the quotes" if is_quoted else self._suggest_plain(marked) or self.hint(marked)
            reader.fault(marked, f"`{name}` must be {self.expected}, not {shown}", hint)
        return value

    def _suggest_plain(self, marked: Marked) -> str | None:
        """Return a hint for a variable, for typographic quotes, or for the `1_000` of YAML 1.1."""
        if not isinstance(marked.value, str):
            return None
        if marked.value[:1] in _CURLY:
            return "replace the typographic quotes by straight ones, or remove them"
        if re.search(r"\$(?:\{[A-Za-z_]|[A-Za-z_])", marked.value):
            return _NOT_HERE
        plain = read_plain(marked.value.replace("_", ""))
        is_number = isinstance(plain, (int, float)) and re.fullmatch(r"[0-9][0-9_.]*", marked.value)
        return f"write `{plain}`" if is_number and self.parse(replace(marked, value=plain)) is not None else None

    def _is_needlessly_quoted(self, marked: Marked) -> bool:
        if not isinstance(marked.value, str):
            return False
        plain = read_plain(marked.value.strip())
        return not isinstance(plain, str) and self.parse(replace(marked, value=plain)) is not None


class Text(Scalar):
    """Text, optionally with a pattern or a rule from `allowed`.

    `also_scalar`: a number or true/false is accepted as its own text. `is_hidden`: an error does not show the value.
    """

    def __init__(
        self,
        *,
        pattern: str | None = None,
        expected: str = "text",
        rule: Rule | None = None,
        also_scalar: bool = False,
        is_hidden: bool = False,
    ) -> None:
        self.rule = rule
        self.pattern = rule.pattern if rule else pattern
        self.expected = rule.expected if rule else expected
        self.also_scalar = also_scalar
        self.is_hidden = is_hidden

    def parse(self, marked: Marked) -> str | None:
        if not isinstance(marked.value, str) and not self.also_scalar:
            return None
        text = marked.value if isinstance(marked.value, str) else marked.text
        if self.rule:
            return text if self.rule.admits(text) else None
        return text if self.pattern is None or re.fullmatch(self.pattern, text) else None

    def read(self, reader: Reader, marked: Marked, name: str) -> Any:
        if self.rule and not self.admits_kind(marked.value):
            reader.fault(marked, f"`{name}` must be text, not {describe(marked)}", self.hint(marked))
            return None
        if not self.is_hidden:
            return super().read(reader, marked, name)
        if (value := self.parse(marked)) is None:
            place = marked.line, marked.column
            reader.note(*place, f"`{name}` must be {self.expected}", self.hint(marked), shows_line=False)
        return value

    def admits_kind(self, value: Any) -> bool:
        return isinstance(value, str) or (self.also_scalar and isinstance(value, (int, float)))

    def hint(self, marked: Marked) -> str | None:
        if isinstance(marked.value, str):
            return self.rule.suggest(marked.value) if self.rule else None
        if isinstance(marked.value, (dict, list)) and self.rule is SCRIPT:
            return "write it as one text: `|` after the colon, and each line indented below, without `-`"
        if isinstance(marked.value, (dict, list)):
            kind = "mapping" if isinstance(marked.value, dict) else "list"
            return f"write a single text after the colon, not a {kind}"
        return "put it in quotes"

    def describe(self) -> Schema:
        kind: Schema = {"type": ["string", "number", "boolean"] if self.also_scalar else "string"}
        if self.rule and self.rule.bytes_max is not None:
            kind["maxLength"] = self.rule.bytes_max  # the schema counts characters, each of which has at least one byte
        return kind if self.pattern is None else {**kind, "pattern": f"^(?:{self.pattern})$"}


class Choice(Scalar):
    """One of a few words, in any case; the value is the spelling in `words`."""

    def __init__(self, *, words: Sequence[str]) -> None:
        self.words = words
        self.expected = f"one of {', '.join(words)}"

    def parse(self, marked: Marked) -> str | None:
        text = marked.value.lower() if isinstance(marked.value, str) else ""
        return next((word for word in self.words if word.lower() == text), None)

    def hint(self, marked: Marked) -> str | None:
        return suggest(marked.value, self.words) if isinstance(marked.value, str) else None

    def describe(self) -> Schema:
        return {"anyOf": [{"enum": list(self.words)}, {"type": "string", "pattern": f"^(?:{any_case(self.words)})$"}]}


class Flag(Scalar):
    """`true` or `false`, or a word that YAML 1.1 reads as such: SkyPilot's files contain `use_spot: yes`."""

    expected = "`true` or `false`"
    _yes, _no = ("yes", "on"), ("no", "off")

    def parse(self, marked: Marked) -> bool | None:
        value = marked.value
        if isinstance(value, str) and value.lower() in (*self._yes, *self._no):
            return value.lower() in self._yes
        return value if isinstance(value, bool) else None

    def admits_kind(self, value: Any) -> bool:
        return isinstance(value, bool) or (isinstance(value, str) and value.lower() in (*self._yes, *self._no))

    def describe(self) -> Schema:
        words = any_case((*self._yes, *self._no))
        return {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": f"^(?:{words})$"}]}


LARGEST = 1_000_000_000  # default maximum of a whole number


class Whole(Scalar):
    """An integer from `minimum` to `maximum`."""

    def __init__(self, *, minimum: int = 0, maximum: int = LARGEST) -> None:
        self.minimum = minimum
        self.maximum = maximum
        most = f" and at most {maximum}" if maximum < LARGEST else ""
        self.expected = f"a whole number of at least {minimum}{most}"

    def hint(self, marked: Marked) -> str | None:
        """Return the exceeded limit, which `expected` omits."""
        value = marked.value
        return f"the largest is {self.maximum}" if self.admits_kind(value) and value > self.maximum else None

    def parse(self, marked: Marked) -> int | None:
        value = marked.value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.minimum <= value <= self.maximum:
            return None
        return int(value) if value == int(value) else None

    def admits_kind(self, value: Any) -> bool:
        return is_number(value)

    def describe(self) -> Schema:
        return {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}


class Number(Scalar):
    """A number above `above` (None: at least 0), and at most `at_most`."""

    def __init__(self, *, above: float | None = 0.0, at_most: float = 1e12) -> None:
        self.above = above
        self.at_most = at_most
        least = "of at least 0" if above is None else f"above {above:g}"
        self.expected = f"a number {least}{f' and at most {at_most:g}' if at_most < 1e12 else ''}"

    def hint(self, marked: Marked) -> str | None:
        """Return the plain number of `$500`, `1,000`, `5k` or `90%`."""
        found = re.fullmatch(r"\s*\$?([0-9][0-9,_]*(?:\.[0-9]+)?)\s*([kK%]|[uU][sS][dD]|\$)?\s*", str(marked.value))
        if not found:
            return None
        factor = {"k": 1000.0, "%": 0.01}.get((found[2] or "").lower(), 1.0)
        number = round(float(found[1].replace(",", "").replace("_", "")) * factor, 9)
        is_valid = self.parse(replace(marked, value=number)) is not None
        return f"write `{number:.12g}`" if is_valid and number != marked.value else None

    def parse(self, marked: Marked) -> float | None:
        value = marked.value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        is_enough = value >= 0 if self.above is None else value > self.above
        return float(value) if is_enough and value <= self.at_most else None

    def admits_kind(self, value: Any) -> bool:
        return is_number(value)

    def describe(self) -> Schema:
        least: Schema = {"minimum": 0} if self.above is None else {"exclusiveMinimum": self.above}
        return {"type": "number", **least, "maximum": self.at_most}


class Anything(Shape):
    """Any value, accepted to avoid an "unknown field" error."""

    expected = "any value"

    def admits_kind(self, value: Any) -> bool:
        return True

    def read(self, reader: Reader, marked: Marked, name: str) -> Any:
        return marked

    def describe(self) -> Schema:
        return {}


class ListOf(Shape):
    """A list of at least `count_min` items of one shape."""

    expected = "a list"

    def __init__(self, *, item: Shape, count_min: int = 0) -> None:
        self.item = item
        self.count_min = count_min

    def admits_kind(self, value: Any) -> bool:
        return isinstance(value, list)

    def read(self, reader: Reader, marked: Marked, name: str) -> list[Any] | None:
        if not isinstance(marked.value, list):
            hint = "put `- ` before each item" if isinstance(marked.value, dict) else "write it as `[...]`"
            reader.fault(marked, f"`{name}` must be a list, not {describe(marked)}", hint)
            return None
        if len(marked.value) < self.count_min:
            reader.fault(marked, f"`{name}` must not be an empty list")
            return None
        items = []
        for each in marked.value:
            if each.value is None and not isinstance(self.item, Anything):
                reader.fault(each, f"`{name}` has an empty item")
            elif (value := self.item.read(reader, each, name)) is not None:
                items.append(value)
        return items

    def describe(self) -> Schema:
        least: Schema = {"minItems": self.count_min} if self.count_min else {}
        return {"type": "array", "items": self.item.describe(), **least}


class MapOf(Shape):
    """A mapping from free keys to values of one shape; with `has_null`, a key without a value gives None."""

    expected = "a mapping"

    def __init__(
        self,
        *,
        value: Shape,
        key: str | Rule = ".+",
        key_expected: str = "text",
        has_null: bool = False,
    ) -> None:
        self.value = value
        self.rule = key if isinstance(key, Rule) else None
        self.key = key.pattern if isinstance(key, Rule) else key
        self.key_expected = key.expected if isinstance(key, Rule) else key_expected
        self.has_null = has_null

    def admits_kind(self, value: Any) -> bool:
        return isinstance(value, dict)

    def read(self, reader: Reader, marked: Marked, name: str) -> dict[str, Any] | None:
        if not isinstance(marked.value, dict):
            reader.fault(marked, f"`{name}` must be a mapping, not {describe(marked)}", suggest_mapping(marked))
            return None
        found: dict[str, Any] = {}
        for key, each in marked.value.items():
            if not (self.rule.admits(key) if self.rule else re.fullmatch(self.key, key, re.DOTALL)):
                hint = self.rule.suggest(key) if self.rule else None
                message = f"a key of `{name}` must be {self.key_expected}, not {describe(key)}"
                reader.note(*marked.keys[key], message, hint)
            elif each.value is None and not isinstance(self.value, Anything):
                if self.has_null:
                    found[key] = None
                else:
                    reader.note(
                        *marked.keys[key], f"`{name}.{key}` has no value", "write one after the colon, or remove it"
                    )
            elif (value := self.value.read(reader, each, f"{name}.{key}")) is not None:
                found[key] = value
        return found

    def describe(self) -> Schema:
        value = allow_null(self.value.describe()) if self.has_null else self.value.describe()
        key: Schema = {"minLength": 1} if self.key == ".+" else {"pattern": f"^(?:{self.key})$"}
        if self.rule and self.rule.bytes_max is not None:
            key["maxLength"] = self.rule.bytes_max
        return {"type": "object", "additionalProperties": value, "propertyNames": key}


class Either(Shape):
    """One of several shapes, distinguished by kind; the first shape of a kind explains its errors."""

    def __init__(self, *, shapes: Sequence[Shape]) -> None:
        self.shapes = shapes
        forms = list(dict.fromkeys(shape.expected for shape in shapes))
        self.expected = (", or " if any("," in form for form in forms[:-1]) else " or ").join(forms)

    def admits_kind(self, value: Any) -> bool:
        return any(shape.admits_kind(value) for shape in self.shapes)

    def read(self, reader: Reader, marked: Marked, name: str) -> Any:
        fitting = [shape for shape in self.shapes if shape.admits_kind(marked.value)]
        for each in fitting:
            if isinstance(each, Scalar) and each.parse(marked) is not None:
                return each.parse(marked)
        if fitting:
            return fitting[0].read(reader, marked, name)
        reader.fault(marked, f"`{name}` must be {self.expected}, not {describe(marked)}")
        return None

    def describe(self) -> Schema:
        return {"anyOf": [shape.describe() for shape in self.shapes]}


def suggest_mapping(marked: Marked) -> str | None:
    """Return a hint for turning a list, or a field without a proper colon, into the expected mapping."""
    if isinstance(marked.value, str):
        if "\u00a0" in marked.value:
            return "replace its no-break spaces (U+00A0), which look like spaces, with spaces"
        return suggest_colon(marked.value)
    return "write `KEY: VALUE` on each line, without `- `" if isinstance(marked.value, list) else None


def allow_null(schema: Schema) -> Schema:
    """Treat a field without a value as absent."""
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    if isinstance(schema.get("type"), list):
        return {**schema, "type": [*schema["type"], "null"]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {"anyOf": [schema, {"type": "null"}]} if schema else schema


def any_case(words: Sequence[str]) -> str:
    """Return a pattern for the words in any case, in the syntax common to Python and JavaScript."""
    return "|".join("".join(f"[{a.lower()}{a.upper()}]" if a.isalpha() else a for a in word) for word in words)
