"""As much of JSON Schema as `broker schema` uses: says whether a value is valid, and makes values that are."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]
KINDS = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
USED = {
    "$schema", "$defs", "$ref", "title", "description", "examples", "deprecated", "type", "enum", "pattern", "anyOf",
    "allOf", "not", "required", "properties", "additionalProperties", "propertyNames", "items", "minItems",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength",
    "maxLength",
}  # fmt: skip


def is_valid(value: Any, schema: Schema, defs: Schema) -> bool:
    assert set(schema) <= USED, f"teach this file {set(schema) - USED}"
    if "$ref" in schema:
        return is_valid(value, defs[schema["$ref"].removeprefix("#/$defs/")], defs)
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not any(KINDS[kind](value) for kind in kinds):
            return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "anyOf" in schema and not any(is_valid(value, each, defs) for each in schema["anyOf"]):
        return False
    if not all(is_valid(value, each, defs) for each in schema.get("allOf", [])):
        return False
    if "not" in schema and is_valid(value, schema["not"], defs):
        return False
    if isinstance(value, str):
        return _fits_text(value, schema)
    if KINDS["number"](value):
        return _fits_number(value, schema)
    if isinstance(value, list):
        return len(value) >= schema.get("minItems", 0) and all(
            is_valid(each, schema.get("items", {}), defs) for each in value
        )
    return _fits_mapping(value, schema, defs) if isinstance(value, dict) else True


def _fits_text(value: str, schema: Schema) -> bool:
    pattern = schema.get("pattern", "")
    fits_length = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    return fits_length and bool(re.search(re.sub(r"\$$", r"\\Z", pattern), value))


def _fits_number(value: float, schema: Schema) -> bool:
    infinite = float("inf")
    return (
        schema.get("minimum", -infinite) <= value <= schema.get("maximum", infinite)
        and schema.get("exclusiveMinimum", -infinite) < value
        and value < schema.get("exclusiveMaximum", infinite)
    )


def _fits_mapping(value: dict[str, Any], schema: Schema, defs: Schema) -> bool:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    if not set(schema.get("required", [])) <= set(value):
        return False
    if not all(is_valid(key, schema.get("propertyNames", {}), defs) for key in value):
        return False
    if others is False and not set(value) <= set(properties):
        return False
    return all(is_valid(each, properties.get(key, others or {}), defs) for key, each in value.items())


def make_values(schema: Schema, defs: Schema, depth: int = 0) -> st.SearchStrategy[Any]:
    """Values that are likely valid; filter by `is_valid` where that matters."""
    if "$ref" in schema:
        return make_values(defs[schema["$ref"].removeprefix("#/$defs/")], defs, depth)
    if "anyOf" in schema:
        return st.one_of([make_values(each, defs, depth) for each in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kinds = schema.get("type", ["string", "boolean", "null"])
    return st.one_of([_make_kind(kind, schema, defs, depth) for kind in ([kinds] if isinstance(kinds, str) else kinds)])


def _make_kind(kind: str, schema: Schema, defs: Schema, depth: int) -> st.SearchStrategy[Any]:
    if kind == "string":
        pattern = schema.get("pattern")
        return st.from_regex(pattern, fullmatch=True) if pattern else st.text("aZ09-_/:.$ é", max_size=8)
    if kind == "boolean":
        return st.booleans()
    if kind == "null":
        return st.none()
    least, most = schema.get("minimum", schema.get("exclusiveMinimum", 0)), schema.get("maximum", 10**9)
    if kind == "integer":
        return st.integers(least, most)
    if kind == "number":
        return st.floats(least, most) | st.integers(int(least), max(int(most), int(least)))
    if kind == "array":
        return st.lists(make_values(schema["items"], defs, depth + 1), min_size=schema.get("minItems", 0), max_size=2)
    properties = schema.get("properties")
    if properties is None:
        keys = make_values({"type": "string", **schema.get("propertyNames", {})}, defs)
        return st.dictionaries(keys, make_values(schema.get("additionalProperties", {}), defs, depth + 1), max_size=2)
    needed = {key: make_values(properties[key], defs, depth + 1) for key in schema.get("required", [])}
    rest = [key for key in properties if key not in needed]
    few = st.lists(st.sampled_from(rest), max_size=0 if depth > 2 else 2, unique=True) if rest else st.just([])
    return few.flatmap(
        lambda keys: st.fixed_dictionaries(
            {**needed, **{key: make_values(properties[key], defs, depth + 1) for key in keys}}
        )
    )
