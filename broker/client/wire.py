"""Verbs over HTTP: the verbs that a server offers, the required roles, and their arguments and results as JSON.

`POST /v1/VERB` takes the arguments as an object. The response is a stream of JSON lines, each one frame: `note` (text
for people), `call` and `value` (a callback of the verb), `ask` and `value` (a callback that is answered before the verb
continues), and finally `result` or `error`. Blank lines keep the connection alive.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, Field, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from broker import __version__, errors
from broker.errors import BrokerError, InvalidRequestError, Issue, TaskError
from broker.frozen import frozen
from broker.state.people import Owned, Role
from broker.types import Plan, Secret

# Increased when an older client or server would misread a frame or an argument. A new field needs no increase: see
# `check_fields`. 2: servers refuse unknown fields.
PROTOCOL = 2
HEADER = "Broker-Protocol"
LINES = "application/x-ndjson"
ASKED = ("confirm",)  # callbacks that may refuse
# Verbs that Ctrl-C of the client interrupts on the server.
INTERRUPTIBLE = (
    "launch", "launch_jobs", "start_cluster", "bring_up_service", "run_map", "run_sweep", "run_on_node"
)  # fmt: skip
LOCAL = ("track_upload",)  # callbacks that only run in the process of the verb
FORECAST = "forecast"  # in addition to the fields of a plan
MESSAGE_MAX = 64 * 2**20


@frozen
class Verb:
    """A verb of the application; `owned` are the arguments whose resources the caller must own, with their kind."""

    name: str
    target: str
    role: Role
    owned: Mapping[str, Owned]

    @property
    def function(self) -> Callable[..., Any]:
        """The function of the verb, imported on first use."""
        module, _, name = self.target.partition(":")
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return found


_UNOWNED: Mapping[str, Owned] = {}  # verbs without an owned argument
_CLUSTER, _JOB, _SERVICE = {"cluster": Owned.CLUSTER}, {"job": Owned.JOB}, {"service": Owned.SERVICE}
_SCHEDULE = {"schedule": Owned.SCHEDULE}
# Module, function, the least role that may call it, and the arguments whose resources the caller must own.
_VERBS: Sequence[tuple[str, str, Role, Mapping[str, Owned]]] = (
    ("clusters", "show_status", Role.VIEWER, _UNOWNED),
    ("clusters", "check_up", Role.VIEWER, _UNOWNED),
    ("clusters", "find_run", Role.VIEWER, _UNOWNED),
    ("clusters", "follow_run", Role.VIEWER, _UNOWNED),
    ("clusters", "list_runs", Role.VIEWER, _UNOWNED),
    ("clusters", "preview_down", Role.VIEWER, _UNOWNED),
    ("clusters", "cancel_runs", Role.USER, _CLUSTER),
    ("clusters", "stop_cluster", Role.USER, _CLUSTER),
    ("clusters", "start_cluster", Role.USER, _CLUSTER),
    ("clusters", "set_autostop", Role.USER, _CLUSTER),
    ("clusters", "terminate_clusters", Role.USER, {"names": Owned.CLUSTER}),
    ("shells", "find_node", Role.VIEWER, _UNOWNED),
    ("shells", "run_on_node", Role.USER, _CLUSTER),
    ("shells", "open_shell", Role.USER, _CLUSTER),
    ("launching", "name_target", Role.VIEWER, _UNOWNED),
    ("launching", "describe_interrupted", Role.VIEWER, _UNOWNED),
    ("launching", "launch", Role.USER, _CLUSTER),
    ("launching", "exec_task", Role.USER, _CLUSTER),
    ("launching", "launch_jobs", Role.USER, _UNOWNED),
    ("launching", "schedule_job", Role.USER, _SCHEDULE),
    ("schedules", "list_schedules", Role.VIEWER, _UNOWNED),
    ("schedules", "list_due_times", Role.VIEWER, _UNOWNED),
    ("schedules", "pause_schedule", Role.USER, _SCHEDULE),
    ("schedules", "resume_schedule", Role.USER, _SCHEDULE),
    ("schedules", "remove_schedule", Role.USER, _SCHEDULE),
    ("jobs", "list_queue", Role.VIEWER, _UNOWNED),
    ("jobs", "list_jobs", Role.VIEWER, _UNOWNED),
    ("jobs", "show_job", Role.VIEWER, _UNOWNED),
    ("jobs", "find_members", Role.VIEWER, _UNOWNED),
    ("jobs", "follow_log", Role.VIEWER, _UNOWNED),
    ("jobs", "list_events", Role.VIEWER, _UNOWNED),
    ("jobs", "explain_job", Role.VIEWER, _UNOWNED),
    ("jobs", "wait_for_job", Role.VIEWER, _UNOWNED),
    ("jobs", "cancel_jobs", Role.USER, {"names": Owned.JOB}),
    ("jobs", "retry_job", Role.USER, _JOB),
    ("jobs", "retry_group", Role.USER, _JOB),
    ("account", "show_cost", Role.VIEWER, _UNOWNED),
    ("account", "check_clouds", Role.VIEWER, _UNOWNED),
    ("account", "plan_tasks", Role.VIEWER, _UNOWNED),
    ("account", "report_month", Role.VIEWER, _UNOWNED),
    ("account", "score_forecasts", Role.VIEWER, _UNOWNED),
    ("account", "list_forecasts", Role.VIEWER, _UNOWNED),
    ("account", "inspect_clouds", Role.VIEWER, _UNOWNED),
    ("account", "inspect_cloud", Role.VIEWER, _UNOWNED),
    ("account", "list_startable", Role.VIEWER, _UNOWNED),
    ("services", "bring_up_service", Role.USER, _SERVICE),
    ("services", "start_service_controller", Role.USER, _UNOWNED),
    ("services", "update_service", Role.USER, _SERVICE),
    ("services", "list_services", Role.VIEWER, _UNOWNED),
    ("services", "explain_service", Role.VIEWER, _UNOWNED),
    ("services", "wait_for_service", Role.VIEWER, _UNOWNED),
    ("services", "follow_service_log", Role.VIEWER, _UNOWNED),
    ("services", "preview_services_down", Role.VIEWER, _UNOWNED),
    ("services", "terminate_services", Role.USER, {"names": Owned.SERVICE}),
    ("batches", "run_map", Role.USER, _UNOWNED),
    ("batches", "run_sweep", Role.USER, _UNOWNED),
    ("batches", "read_sweep", Role.VIEWER, _UNOWNED),
    ("watching", "watch_jobs", Role.VIEWER, _UNOWNED),
    ("watching", "read_job_history", Role.VIEWER, _UNOWNED),
    ("broker.dashboard.verbs", "show_overview", Role.VIEWER, _UNOWNED),
    ("broker.dashboard.verbs", "list_locations", Role.VIEWER, _UNOWNED),
)


def _list_verbs() -> Sequence[Verb]:
    return [
        Verb(name=name, target=f"{_find_module(module)}:{name}", role=role, owned=owned)
        for module, name, role, owned in _VERBS
    ]


def _find_module(name: str) -> str:
    return name if "." in name else f"broker.app.verbs.{name}"


VERBS: Mapping[str, Verb] = {verb.name: verb for verb in _list_verbs()}


def find_verb(function: Callable[..., object]) -> Verb:
    """Find the verb of a function. Raises AssertionError for a function that no server offers."""
    verb = VERBS.get(function.__name__)
    assert verb is not None and verb.target == f"{function.__module__}:{function.__name__}", function
    return verb


@frozen
class Signature:
    """The types of a verb: its arguments, the data for its callbacks, and its result."""

    arguments: Mapping[str, Any]
    callbacks: Mapping[str, Any]
    result: Any


@cache
def read_signature(function: Callable[..., object]) -> Signature:
    """Read the types of a verb from its annotations."""
    hints = get_type_hints(function)
    result = hints.pop("return")
    del hints["context"]
    arguments, callbacks = {}, {}
    for name, hint in hints.items():
        if name in LOCAL:
            continue
        if get_origin(hint) is Callable:
            callbacks[name] = get_args(hint)[0][0]
        else:
            arguments[name] = hint
    return Signature(arguments=arguments, callbacks=callbacks, result=result)


def encode(value: Any, *, is_argument: bool = False) -> Any:
    """Convert nouns, errors and containers to JSON-ready data.

    In an argument, secrets are revealed and fields with their default are omitted, so that an older server understands
    every task that it can run. Elsewhere secrets become `***`. Infinite numbers, which JSON lacks, become text.
    """
    if isinstance(value, Secret):
        return {"value": value.value if is_argument else "***"}
    if isinstance(value, BrokerError):
        return encode_error(value)
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(encode(key)): encode(each, is_argument=is_argument) for key, each in value.items()}
    if isinstance(value, Sequence | AbstractSet):
        return [encode(each, is_argument=is_argument) for each in value]
    assert hasattr(value, "__dataclass_fields__"), f"cannot encode {type(value).__name__}"
    data = {
        name: encode(getattr(value, name), is_argument=is_argument)
        for name, field in value.__dataclass_fields__.items()
        if not (is_argument and _has_default(value, field))
    }
    if isinstance(value, Plan) and value.choice.placement.is_spot and value.choice.breakdown is not None:
        from broker.optimizer.forecast import forecast_plan

        data[FORECAST] = encode(forecast_plan(value))  # computed from data that the planner holds but does not send
    return data


def _has_default(value: Any, field: Field[Any]) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return default is not MISSING and bool(getattr(value, field.name) == default)


def check_fields(data: Any, found: Any, where: str) -> None:
    """Raise InvalidRequestError if `data`, from which `found` was decoded, has a field that its type lacks.

    Such a field is of a newer client. Without it, the task would run differently than its file says.
    """
    if isinstance(found, Mapping) and isinstance(data, Mapping):
        values = {str(encode(key)): value for key, value in found.items()}
        for key in data.keys() & values.keys():
            check_fields(data[key], values[key], f"{where}.{key}")
    elif isinstance(found, list | tuple) and isinstance(data, list):
        for each, value in zip(data, found, strict=True):
            check_fields(each, value, where)
    elif isinstance(data, Mapping) and (known := getattr(found, "__dataclass_fields__", None)) is not None:
        if unknown := sorted(data.keys() - known.keys() - {FORECAST}):
            raise InvalidRequestError(
                f"`{where}` has the field `{unknown[0]}`, which this server ({__version__}) does not support",
                hints=("upgrade the server, or remove the field from the task",),
            )
        for key, each in data.items():
            if key in known:
                check_fields(each, getattr(found, key), f"{where}.{key}")


def decode(data: Any, hint: Any) -> Any:
    """Convert data from `encode` to a type. Raises InvalidRequestError for data of a different shape."""
    import msgspec

    def make(kind: type, given: Any) -> Any:
        if isinstance(kind, type) and issubclass(kind, BrokerError):
            return decode_error(given)
        if kind is object:  # the data of an event
            return given
        raise NotImplementedError(f"unsupported type in a verb: {kind}")

    try:
        found = msgspec.convert(data, type=hint, strict=False, str_keys=True, dec_hook=make)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"invalid data: {error}") from None
    if isinstance(found, list | tuple) and found and isinstance(found[0], Plan):
        return [_add_forecast(plan, each) for plan, each in zip(found, data, strict=True)]
    return found


def _add_forecast(plan: Plan, data: Mapping[str, Any]) -> Plan:
    from broker.optimizer.forecast import CostForecast, ForecastEstimates

    estimates = ForecastEstimates(plan.estimates)
    estimates.forecast = decode(data.get(FORECAST), CostForecast | None)
    return replace(plan, estimates=estimates)


EXTRAS = ("returncode", "scope", "node_id", "table", "key")  # additional attributes of some errors


def encode_error(error: BrokerError) -> Mapping[str, Any]:
    """Convert an error to data, identified by the name of its class."""
    extras = {name: getattr(error, name) for name in EXTRAS if hasattr(error, name)}
    issues = {"issues": encode(error.issues)} if isinstance(error, TaskError) else {}
    return {
        "kind": type(error).__name__,
        "message": error.message,
        "hints": list(error.hints),
        "details": list(error.details),
        **extras,
        **issues,
    }


def decode_error(data: Mapping[str, Any]) -> BrokerError:
    """Recreate the error; a kind known only to a newer server becomes a plain BrokerError."""
    kind = getattr(errors, str(data.get("kind")), BrokerError)
    if not (isinstance(kind, type) and issubclass(kind, BrokerError)):
        kind = BrokerError
    made = kind.__new__(kind)
    texts = {name: [str(each) for each in data.get(name) or ()] for name in ("hints", "details")}
    BrokerError.__init__(made, str(data.get("message")), hints=texts["hints"], details=texts["details"])
    for name in EXTRAS:
        if name in data:
            setattr(made, name, data[name])
    if isinstance(made, TaskError):
        made.issues = tuple(decode(data["issues"], tuple[Issue, ...]))
    return made
