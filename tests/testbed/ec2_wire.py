"""AWS's wire formats, both directions, by the service models that botocore ships.

A request that names a parameter the model does not have is refused, as EC2 refuses it. moto checks independently that
what the adapter sends is understood elsewhere too.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

EC2_XML = "http://ec2.amazonaws.com/doc/2016-11-15/"


class ApiError(Exception):
    """A service's error answer: its code, a message, and the HTTP status."""

    def __init__(self, code: str, message: str = "played by the test", status: int = 400) -> None:
        super().__init__(code)
        self.code = code
        self.message = message
        self.status = status


@cache
def load_model(service: str) -> Any:
    from botocore.loaders import Loader
    from botocore.model import ServiceModel

    return ServiceModel(Loader().load_service_model(service, "service-2"))


def read_request(service: str, body: bytes, target: str) -> tuple[str, dict[str, Any]]:
    """Return the action and its parameters, as boto3's caller wrote them."""
    if service in ("ssm", "servicequotas"):
        return target.rpartition(".")[2], json.loads(body or b"{}")
    form = dict(parse_qsl(body.decode(), keep_blank_values=True))
    action = form.pop("Action")
    form.pop("Version", None)
    model = load_model(service)
    if action not in model.operation_names:
        raise ApiError("InvalidAction", action)
    shape = model.operation_model(action).input_shape
    return action, _read_structure(_nest(form), shape) if shape else {}


def _nest(form: Mapping[str, str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in form.items():
        *parents, leaf = path.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    return tree


def _read_structure(tree: Mapping[str, Any], shape: Any) -> dict[str, Any]:
    names = {_query_name(name, member): (name, member) for name, member in shape.members.items()}
    found = {}
    for key, value in tree.items():
        if key not in names:
            raise ApiError("UnknownParameter", f"{shape.name} has no {key}")
        name, member = names[key]
        found[name] = _read(value, member)
    return found


def _read(value: Any, shape: Any) -> Any:
    kind = shape.type_name
    if kind == "structure":
        return _read_structure(value, shape)
    if kind == "list":
        value = value.get("member", value)  # IAM's lists have one more level than EC2's
        return [_read(value[index], shape.member) for index in sorted(value, key=int)]
    if kind == "boolean":
        return value == "true"
    if kind in ("integer", "long"):
        return int(value)
    if kind in ("float", "double"):
        return float(value)
    if kind == "blob":
        return base64.b64decode(value)
    return value


def _query_name(name: str, shape: Any) -> str:
    serialization = shape.serialization
    if "queryName" in serialization:
        return str(serialization["queryName"])
    given = serialization.get("name", name)
    return str(given[0].upper() + given[1:]) if "name" in serialization else name


def write_answer(service: str, action: str, answer: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return content type and body."""
    if service in ("ssm", "servicequotas"):
        return "application/x-amz-json-1.1", json.dumps(answer).encode()
    shape = load_model(service).operation_model(action).output_shape
    inner = "".join(_write_members(answer, shape)) if shape else ""
    if service in ("sts", "iam"):
        inner = f"<{action}Result>{inner}</{action}Result>"
    return "text/xml", f'<{action}Response xmlns="{EC2_XML}">{inner}</{action}Response>'.encode()


def _write_members(value: Mapping[str, Any], shape: Any) -> list[str]:
    unknown = set(value) - set(shape.members)
    assert not unknown, f"{shape.name} has no {unknown}"
    return [
        _write(shape.members[name].serialization.get("name", name), value[name], shape.members[name]) for name in value
    ]


def _write(tag: str, value: Any, shape: Any) -> str:
    kind = shape.type_name
    if kind == "structure":
        inner = "".join(_write_members(value, shape))
    elif kind == "list":
        item = shape.member.serialization.get("name", "member")
        inner = "".join(_write(item, each, shape.member) for each in value)
    elif kind == "boolean":
        inner = "true" if value else "false"
    elif kind == "timestamp":
        inner = datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    else:
        inner = escape(str(value))
    return f"<{tag}>{inner}</{tag}>"


def write_error(service: str, error: ApiError) -> tuple[str, bytes]:
    if service in ("ssm", "servicequotas"):
        body = json.dumps({"__type": error.code, "message": error.message})
        return "application/x-amz-json-1.1", body.encode()
    inner = f"<Code>{escape(error.code)}</Code><Message>{escape(error.message)}</Message>"
    if service in ("sts", "iam"):
        return "text/xml", f"<ErrorResponse><Error>{inner}</Error></ErrorResponse>".encode()
    return "text/xml", f"<Response><Errors><Error>{inner}</Error></Errors><RequestID>r</RequestID></Response>".encode()
