"""The OpenAPI document, generated from the types of the verbs."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from broker import __version__
from broker.client.wire import ASKED, HEADER, LINES, PROTOCOL, VERBS, Signature, read_signature
from broker.errors import BrokerError

ERROR = {
    "type": "object",
    "required": ["kind", "message", "hints", "details"],
    "properties": {
        "kind": {"type": "string", "description": "class in broker/errors.py"},
        "message": {"type": "string"},
        "hints": {"type": "array", "items": {"type": "string"}},
        "details": {"type": "array", "items": {"type": "string"}},
    },
}


@cache
def describe_api() -> dict[str, Any]:
    """Describe every route as OpenAPI 3.1."""
    import msgspec

    signatures = [(verb, read_signature(verb.function)) for verb in VERBS.values()]
    types = [hint for _, each in signatures for hint in (*each.arguments.values(), each.result)]

    def describe_error(kind: type) -> dict[str, Any]:
        if kind is object:
            return {"description": "any value"}
        assert issubclass(kind, BrokerError)
        return {"$ref": "#/components/schemas/Error"}

    schemas, components = msgspec.json.schema_components(
        types, schema_hook=describe_error, ref_template="#/components/schemas/{name}"
    )
    found = iter(schemas)
    paths: dict[str, Any] = {}
    for verb, signature in signatures:
        arguments = {name: next(found) for name in signature.arguments}
        parameters = inspect.signature(verb.function).parameters
        required = [name for name in arguments if parameters[name].default is inspect.Parameter.empty]
        callbacks = ", ".join(signature.callbacks) or "none"
        text = inspect.getdoc(verb.function) or ""
        body = {"type": "object", "properties": arguments, "required": required, "additionalProperties": False}
        paths[f"/v1/{verb.name}"] = {
            "post": {
                "operationId": verb.name,
                "summary": " ".join(text.partition("\n\n")[0].split()),
                "description": f"Requires the role `{verb.role.value}`. Callbacks: {callbacks}.",
                "tags": [verb.target.split(":")[0].rpartition(".")[2]],
                "parameters": _describe_parameters(signature),
                "requestBody": {"required": bool(required), "content": {"application/json": {"schema": body}}},
                "responses": _describe_answers(next(found)),
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "broker", "version": __version__},
        "security": [{"token": []}],
        "paths": {**paths, **_describe_others()},
        "components": {
            "schemas": {**components, "Error": ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe_parameters(signature: Signature) -> list[dict[str, Any]]:
    header = {"name": HEADER, "in": "header", "schema": {"const": str(PROTOCOL)}}
    if not signature.callbacks.keys() & set(ASKED):
        return [header]
    text = "`true` accepts the price in advance; otherwise a client that reads no frames is refused"
    return [header, {"name": "yes", "in": "query", "description": text, "schema": {"type": "string"}}]


def _describe_answers(result: dict[str, Any]) -> dict[str, Any]:
    texts = {"type": "array", "items": {"type": "string"}}
    whole = {"type": "object", "properties": {"result": result, "notes": texts, "calls": {"type": "object"}}}
    frames = {"type": "string", "description": "one frame per line: note, call, ask, result or error"}
    refused = {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"$ref": "#/components/schemas/Error"}, "notes": texts},
    }
    return {
        "200": {
            "description": "done",
            "content": {"application/json": {"schema": whole}, LINES: {"schema": frames}},
        },
        "default": {"description": "error", "content": {"application/json": {"schema": refused}}},
    }


def _describe_others() -> dict[str, Any]:
    digest = {
        "name": "digest",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    }
    request_id = {**digest, "name": "id", "schema": {"type": "string", "pattern": "^[0-9a-f]{32}$"}}
    done = {"200": {"description": "done"}, "default": {"description": "error"}}
    open_to_all: list[Any] = []
    return {
        "/healthz": {"get": {"operationId": "healthz", "security": open_to_all, "responses": done}},
        "/readyz": {"get": {"operationId": "readyz", "security": open_to_all, "responses": done}},
        "/openapi.json": {"get": {"operationId": "openapi", "security": open_to_all, "responses": done}},
        "/metrics": {"get": {"operationId": "metrics", "responses": done}},
        "/v1/handshake": {"get": {"operationId": "handshake", "responses": done}},
        "/v1/login": {
            "get": {"operationId": "begin_login", "security": open_to_all, "responses": done},
            "post": {
                "operationId": "finish_login",
                "security": open_to_all,
                "requestBody": {"content": {"application/json": {"schema": {
                    "type": "object", "required": ["code", "verifier", "redirect_uri", "nonce"],
                    "properties": {
                        name: {"type": "string"} for name in ("code", "verifier", "redirect_uri", "nonce")
                    },
                }}}},
                "responses": done,
            },
        },
        "/v1/files/{digest}": {
            "parameters": [digest],
            "get": {"operationId": "find_files", "responses": done},
            "put": {
                "operationId": "send_files",
                "requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string"}}}},
                "responses": done,
            },
        },
        "/v1/answers/{id}": {
            "parameters": [request_id],
            "post": {
                "operationId": "answer",
                "requestBody": {"content": {"application/json": {"schema": {
                    "type": "object", "properties": {"is_accepted": {"type": "boolean"}},
                }}}},
                "responses": done,
            },
        },
        "/v1/input/{id}": {"parameters": [request_id], "post": _describe_input(done)},
        "/v1/cancel/{id}": {
            "parameters": [request_id],
            "post": {
                "operationId": "cancel",
                "summary": "Interrupt a running verb, as Ctrl-C in a command; `id` is in its first frame.",
                "responses": done,
            },
        },
    }  # fmt: skip


def _describe_input(responses: dict[str, Any]) -> dict[str, Any]:
    side = {"type": "integer", "minimum": 1}
    size = {"type": ["object", "null"], "properties": {"rows": side, "columns": side}}
    keys = {"type": "string", "contentEncoding": "base64"}
    return {
        "operationId": "send_input",
        "summary": "Send typed keys, or a new size of the terminal, to the `open_shell` with this `id`.",
        "requestBody": {
            "content": {"application/json": {"schema": {"type": "object", "properties": {"data": keys, "size": size}}}}
        },
        "responses": responses,
    }
