"""The JSON Schema and the loader share one table: they accept and refuse the same values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from broker.errors import TaskError
from broker.task.loader import load_tasks_text
from broker.task.reading import Reader
from broker.task.schema import list_tables, make_schema
from broker.task.tables import Table
from broker.task.yaml_reader import Marked
from tests.task.json_schema import make_validator, make_values
from tests.tiers import examples, spread

SCHEMA = make_schema()
DEFS = SCHEMA["$defs"]
TABLES = {table.name: table for table in list_tables()}
VALIDATORS = {name: make_validator(name, DEFS) for name in TABLES}
FIELDS = [(name, key) for name in sorted(TABLES) for key in TABLES[name].fields]
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 70_000) | st.floats(-2, 2) | st.text("aA1:/-+ .$", max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("aA1:", max_size=3), inner, max_size=2),
    max_leaves=4,
)
QUIET = settings(
    max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)


def mark(value: Any) -> Marked:
    if isinstance(value, list):
        return Marked(value=[mark(each) for each in value], line=1, column=1)
    if isinstance(value, dict):
        pairs = {key: mark(each) for key, each in value.items()}
        return Marked(value=pairs, line=1, column=1, keys=dict.fromkeys(pairs, (1, 1)))
    return Marked(value=value, line=1, column=1, text="" if value is None else str(value))


def accepts(table: Table, value: dict[str, Any]) -> bool:
    reader = Reader("", "x.yaml")
    table.read(reader, mark(value), table.name)
    return not reader.issues


def fill(name: str, key: str, value: Any) -> dict[str, Any]:
    """Return the table's smallest mapping with this field in it."""
    needed = {"path": "/", "min_replicas": 1, "keyfile": "k", "certfile": "c", "run": "x", "url": "u", "hours": 1,
              "cron": "0 2 * * *", "type": "haproxy"}  # fmt: skip
    required = DEFS[name].get("required", [])
    return {**{each: needed[each] for each in required}, key: value}


def is_backwards(value: Any) -> bool:
    """Return whether a range of ports is descending: the one rule that the schema cannot express."""
    if isinstance(value, list):
        return any(is_backwards(each) for each in value)
    if isinstance(value, str) and "," in value:
        return any(is_backwards(each) for each in value.split(","))
    ends = [end.strip() for end in value.split("-")] if isinstance(value, str) else []
    return len(ends) == 2 and all(end.isdigit() for end in ends) and int(ends[0]) > int(ends[1])


@pytest.mark.parametrize(("name", "key"), spread(FIELDS, every=4, more=2), ids=lambda each: each)
@QUIET
@given(data=st.data())
def test_loader_takes_what_the_schema_takes_and_nothing_else(name: str, key: str, data: st.DataObject) -> None:
    shape = DEFS[name]["properties"][key]
    value = data.draw(make_values(shape, DEFS) | JUNK)
    if key == "ports" and is_backwards(value):
        return
    whole = fill(name, key, value)
    assert accepts(TABLES[name], whole) == VALIDATORS[name].is_valid(whole), value


@pytest.mark.parametrize(("name", "key"), FIELDS, ids=lambda each: each)
def test_every_field_is_described_for_the_editor(name: str, key: str) -> None:
    field = DEFS[name]["properties"][key]
    assert field["description"].strip()
    for example in field.get("examples", []):
        assert VALIDATORS[name].is_valid(fill(name, key, example)), example


@pytest.mark.parametrize("name", sorted(TABLES))
def test_unknown_field_is_refused_by_both_or_noted(name: str) -> None:
    required = DEFS[name].get("required", [])
    whole = (
        {**fill(name, required[0], {"path": "/"}.get(required[0], 1)), "nonsense": 1} if required else {"nonsense": 1}
    )
    is_noted = TABLES[name].others is not None
    assert accepts(TABLES[name], whole) == VALIDATORS[name].is_valid(whole) == is_noted


@settings(QUIET, max_examples=examples(150))
@given(value=make_values(DEFS["resources"], DEFS))
def test_valid_resources_load_from_text(value: dict[str, Any]) -> None:
    """Through the whole loader: whatever the shapes accept can become a task."""
    if not VALIDATORS["resources"].is_valid(value):
        return
    try:
        (task,) = load_tasks_text(json.dumps({"resources": value, "run": "x"}), "x.yaml")
    except TaskError as error:
        known = (
            "`ports` must be",
            "more than one accelerator",
            "not valid YAML",
            "duplicate key",
        )
        assert all(issue.message.startswith(known) for issue in error.issues), value
    else:
        assert task.resources


def test_schema_names_its_draft_and_stays_small() -> None:
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(SCHEMA)
    assert len(json.dumps(SCHEMA)) < 100_000
    assert {"task", "header", "resources", "service"} <= set(DEFS)


def test_skypilot_fields_are_all_there() -> None:
    """Names from SkyPilot 0.14.1, sky/utils/schemas.py: get_task_schema, get_resources_schema, get_storage_schema."""
    task = (
        "name workdir event_callback num_nodes resources file_mounts service pool setup run envs secrets inputs outputs"
        " managed_secrets file_mounts_mapping config volumes volume_mounts api_server_access _metadata"
    )
    resources = (
        "cloud region zone infra cpus memory accelerators instance_type use_spot job_recovery volumes disk_size labels"
        " ephemeral_storage disk_tier network_tier local_disk max_hourly_cost ports accelerator_args image_id autostop"
        " priority priority_class any_of ordered gpus _no_missing_accel_warnings _docker_login_config _is_image_managed"
        " _requires_fuse _cluster_config_overrides"
    )
    storage = "name source store persistent mode type config _is_sky_managed _bucket_sub_path _force_delete"
    for name, fields in (("task", task), ("resources", resources), ("storage", storage)):
        assert set(fields.split()) <= set(DEFS[name]["properties"])
