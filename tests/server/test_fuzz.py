"""Requests drawn from the OpenAPI document and close variants: none causes an internal error of the server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.client.wire import VERBS
from broker.server.context import Policy
from broker.server.openapi import describe_api
from tests.server.conftest import Hosted
from tests.tiers import examples

ASKING_CLOUDS = ("inspect_clouds", "inspect_cloud", "list_startable")
DEPTH_MAX = 4
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8), st.just([]), st.just({}), st.just(["\x00", "\ud83d"]), st.just({"": None}),
)  # fmt: skip


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A server without any cloud, so that no request starts anything."""
    with pytest.MonkeyPatch.context() as patch:
        nowhere = str(tmp_path_factory.mktemp("no-login") / "none")
        for name in ("CLOUDSDK_CONFIG", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "BROKER_SKY_PYTHON"):
            patch.setenv(name, nowhere)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("NO_GCE_CHECK", "true")
        hosted = Hosted(tmp_path_factory.mktemp("server"), policy=Policy(has_controller=False))
        yield hosted
        hosted.stop()


def draw_from(schema: Mapping[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """Return a strategy for data that a schema admits and, occasionally, for other data."""
    return st.one_of(*[_draw(schema, depth)] * 9, JUNK)


def _draw(schema: Mapping[str, Any], depth: int) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        found = describe_api()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return _draw(found, depth + 1)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of(*[_draw(each, depth) for each in schema["anyOf"]])
    match schema.get("type"):
        case "string":
            return st.one_of(
                st.text(max_size=12), st.sampled_from(["dev", "1", "*", "s3://b/k", "../x", "file:///etc"])
            )
        case "integer":
            return st.integers(schema.get("minimum", -5), schema.get("maximum", 10**6))
        case "number":
            return st.floats(-1e9, 1e9)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            items = schema.get("items") or {}
            return st.lists(draw_from(items, depth + 1), max_size=0 if depth > DEPTH_MAX else 2)
        case "object":
            return _draw_object(schema, depth)
    return JUNK


def _draw_object(schema: Mapping[str, Any], depth: int) -> st.SearchStrategy[Any]:
    named = schema.get("properties") or {}
    if not named:
        values = schema.get("additionalProperties")
        inner = draw_from(values, depth + 1) if isinstance(values, dict) else JUNK
        return st.dictionaries(st.text(max_size=4), inner, max_size=0 if depth > DEPTH_MAX else 2)
    required = {name: draw_from(named[name], depth + 1) for name in schema.get("required") or ()}
    rest = {} if depth > DEPTH_MAX else {
        name: draw_from(each, depth + 1) for name, each in named.items() if name not in required
    }  # fmt: skip
    return st.fixed_dictionaries(required, optional=rest)


def test_text_that_cannot_be_stored_is_refused_and_does_not_hang(closed: Hosted) -> None:
    status, answer = closed.ask("/v1/terminate_clusters", {"names": ["\ud83d"]}, token=closed.tokens["admin"])
    assert status == 400 and "must be a JSON object of valid Unicode text" in answer["error"]["message"]


@pytest.mark.parametrize("verb", [name for name in VERBS if name not in ASKING_CLOUDS])
def test_no_request_is_a_bug_in_the_server(closed: Hosted, verb: str) -> None:
    content = describe_api()["paths"][f"/v1/{verb}"]["post"]["requestBody"]["content"]
    token = closed.tokens["admin"]

    @settings(
        max_examples=examples(12),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(body=_draw_object(content["application/json"]["schema"], 0))
    def ask(body: dict[str, Any]) -> None:
        status, answer = closed.ask(f"/v1/{verb}", body, token=token)
        assert status < 500 or "bug in the server" not in str(answer), (verb, body, answer)
        assert isinstance(answer, dict) and ("result" in answer) is (status == 200)

    ask()
