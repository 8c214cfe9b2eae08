"""Values drawn from the JSON Schema of `broker schema`, and whether a value is valid by it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from jsonschema import Draft202012Validator

Schema = dict[str, Any]


def make_validator(name: str, defs: Schema) -> Draft202012Validator:
    """Return a validator for the definition with this name."""
    return Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": defs})


def make_values(schema: Schema, defs: Schema, depth: int = 0) -> st.SearchStrategy[Any]:
    """Return a strategy for values that are likely valid; check them where that matters."""
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
        return st.lists(
            make_values(schema.get("items", {}), defs, depth + 1), min_size=schema.get("minItems", 0), max_size=2
        )
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
