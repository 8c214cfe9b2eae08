"""Every error of Google or its library becomes one of ours, by one table."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import google.api_core.exceptions as api
import google.auth.exceptions as auth
import pytest
import requests
from google.api.error_reason_pb2 import ErrorReason
from google.cloud import compute_v1

from broker.clouds.gcp import errors
from broker.clouds.gcp.errors import (
    BusyError,
    DisabledError,
    ExistsError,
    NotFoundError,
    UnpaidError,
    make_error,
    translate,
)
from broker.errors import (
    AuthError,
    CapacityError,
    CloudError,
    DeniedError,
    InvalidRequestError,
    QuotaError,
    ThrottledError,
    TransientError,
    UnknownOutcomeError,
)

# Documented codes that our calls can return, by page; all read on 2026-11-22:
# https://docs.cloud.google.com/compute/docs/troubleshooting/troubleshooting-vm-creation
# https://docs.cloud.google.com/compute/docs/troubleshooting/troubleshooting-bulk-vm-creation
# https://docs.cloud.google.com/compute/docs/troubleshooting/troubleshooting-resource-availability
# https://docs.cloud.google.com/compute/docs/reference/rest/v1/errors (its first rows)
DOCUMENTED = {
    "CONDITION_NOT_MET", "FORBIDDEN", "INTERNAL_ERROR", "INVALID_FIELD_VALUE", "INVALID_USAGE", "LIMIT_EXCEEDED",
    "PERMISSIONS_ERROR", "QUOTA_EXCEEDED", "RESOURCE_ALREADY_EXISTS", "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE",
    "RESOURCE_NOT_FOUND", "RESOURCE_NOT_READY", "RESOURCE_OPERATION_RATE_EXCEEDED", "RESOURCE_POOL_EXHAUSTED",
    "UNSUPPORTED_OPERATION", "ZONE_RESOURCE_POOL_EXHAUSTED", "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
    "VM_MIN_COUNT_NOT_REACHED", "insufficientCapacity",
    "FIELD_SIZE_TOO_LARGE", "MISSING_REQUIRED_FIELD", "PROJECT_NOT_FOUND", "NETWORK_NOT_FOUND",
    "SERVICE_UNAVAILABLE_FOR_LOCATION",
    "accessNotConfigured", "alreadyExists", "authError", "backendError", "badRequest", "conditionNotMet",
    "dailyLimitExceeded", "duplicate", "expired", "forbidden", "insufficientPermissions", "internalError", "invalid",
    "invalidParameter", "limitExceeded", "notFound", "parseError", "quotaExceeded", "rateLimitExceeded", "required",
    "resourceInUseByAnotherResource", "resourceNotReady", "unauthorized", "userRateLimitExceeded",
}  # fmt: skip
OURS = (
    *(AuthError, CapacityError, InvalidRequestError, QuotaError, ThrottledError, TransientError, UnknownOutcomeError),
    *(BusyError, DeniedError, DisabledError, ExistsError, NotFoundError, UnpaidError),
)
API_ERRORS = sorted(
    (each for each in vars(api).values() if isinstance(each, type) and issubclass(each, api.GoogleAPICallError)),
    key=lambda each: each.__name__,
)
AUTH_ERRORS = sorted(
    (each for each in vars(auth).values() if isinstance(each, type) and issubclass(each, auth.GoogleAuthError)),
    key=lambda each: each.__name__,
)


def test_the_table_has_every_code_that_google_documents() -> None:
    assert DOCUMENTED - errors.CODES.keys() == set()
    # The reasons of `google.rpc.ErrorInfo` in the domain googleapis.com, as in Google's own library.
    reasons = set(ErrorReason.keys()) - {"ERROR_REASON_UNSPECIFIED"}
    assert len(reasons) > 30 and reasons - errors.CODES.keys() == set()
    assert all(kind in OURS for kind in (*errors.CODES.values(), *errors.STATUSES.values()))
    assert set(errors.CAPACITY_SCOPES) <= {code for code, kind in errors.CODES.items() if kind is CapacityError}


@pytest.mark.parametrize("code", sorted(errors.CODES))
def test_each_code_makes_its_error_with_googles_words(code: str) -> None:
    error = make_error(code, "It was so.")
    assert type(error) is errors.CODES[code]
    assert error.message == f"It was so ({code})"
    assert error.hints or not isinstance(error, AuthError | QuotaError)


@pytest.mark.parametrize("does_change", [False, True])
def test_every_http_status_has_an_answer(does_change: bool) -> None:
    for status in range(400, 600):
        error = translate(api.from_http_status(status, "why"), does_change=does_change)
        assert isinstance(error, CloudError)
        assert "why" in error.message
        if status >= 500:
            assert isinstance(error, UnknownOutcomeError if does_change else TransientError)
        else:
            assert type(error) is errors.STATUSES.get(status, InvalidRequestError)


@pytest.mark.parametrize("kind", API_ERRORS, ids=lambda each: each.__name__)
def test_every_class_of_googles_library_is_known(kind: Any) -> None:
    try:
        error = kind("why")
    except TypeError:
        error = kind(SimpleNamespace(status_code=400, headers={}))
    for does_change in (False, True):
        assert isinstance(translate(error, does_change=does_change), CloudError)


@pytest.mark.parametrize("kind", AUTH_ERRORS, ids=lambda each: each.__name__)
def test_every_fault_of_the_login_says_how_to_log_in_or_may_pass(kind: Any) -> None:
    error = translate(kind("why"), does_change=True)
    if kind is auth.TransportError:
        assert isinstance(error, TransientError)
    else:
        assert isinstance(error, AuthError) and "gcloud auth application-default login" in error.hints[0]


@pytest.mark.parametrize(
    "error", [requests.ConnectionError(), requests.Timeout(), TimeoutError(), ConnectionResetError(), OSError()]
)
def test_no_response_is_an_unknown_outcome_if_something_may_have_changed(error: Exception) -> None:
    assert isinstance(translate(error, does_change=True), UnknownOutcomeError)
    assert type(translate(error, does_change=False)) is TransientError


@pytest.mark.parametrize("does_change", [False, True])
def test_an_organisation_policy_is_a_permanent_refusal_not_a_busy_resource(does_change: bool) -> None:
    text = "Constraint constraints/compute.vmExternalIpAccess violated for project 1. Add instance x to the constraint."
    error = translate(answer(412, "conditionNotMet", text), does_change=does_change)
    assert isinstance(error, DeniedError) and error.scope == "region"
    assert "vmExternalIpAccess" in error.message and "org-policies" in error.hints[0]


def test_bugs_in_broker_are_not_hidden() -> None:
    assert translate(KeyError("x"), does_change=True) is None


def test_a_refusal_with_status_503_is_believed_where_its_reason_is_known() -> None:
    error = api.from_http_status(503, "full", errors=[{"reason": "ZONE_RESOURCE_POOL_EXHAUSTED"}])
    assert isinstance(translate(error, does_change=True), CapacityError)


def test_an_operations_cause_precedes_its_consequences() -> None:
    def operation(*codes: str, status: int = 0) -> Any:
        errors = [SimpleNamespace(code=code, message="", error_details=()) for code in codes]
        return SimpleNamespace(
            error=SimpleNamespace(errors=errors), http_error_status_code=status, http_error_message="BAD"
        )

    assert errors.read_operation_error(operation()) is None
    assert isinstance(errors.read_operation_error(operation(status=403)), AuthError)
    both = operation("RESOURCE_NOT_FOUND", "ZONE_RESOURCE_POOL_EXHAUSTED")
    assert isinstance(errors.read_operation_error(both), CapacityError)
    for cause, wanted in (
        ("CONDITION_NOT_MET", DeniedError), ("QUOTA_EXCEEDED", QuotaError), ("RESOURCE_ALREADY_EXISTS", ExistsError),
        ("ZONE_RESOURCE_POOL_EXHAUSTED", CapacityError), ("INTERNAL_ERROR", CapacityError),
    ):  # fmt: skip
        for codes in (("VM_MIN_COUNT_NOT_REACHED", cause), (cause, "VM_MIN_COUNT_NOT_REACHED")):
            assert type(errors.read_operation_error(operation(*codes))) is wanted, codes


def answer(status: int, reason: str, message: str, *, detail: str = "") -> api.GoogleAPICallError:
    """Make the exception that Google's library raises; `detail` is the newer kind of reason."""
    info = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": detail, "domain": "googleapis.com"}
    body = {"code": status, "message": message, "errors": [{"message": message, "domain": "global", "reason": reason}]}
    response = requests.Response()
    response.status_code = status
    response._content = json.dumps({"error": body | ({"details": [info]} if detail else {})}).encode()
    response.request = requests.Request("POST", "https://compute.googleapis.com/x").prepare()
    error: api.GoogleAPICallError = api.from_http_response(response)
    return error


def test_googles_message_is_shown_without_the_url() -> None:
    error = translate(answer(400, "invalid", "Invalid value for field 'x'."), does_change=True)
    assert error is not None and error.message == "Invalid value for field 'x' (invalid)"


@pytest.mark.parametrize(
    ("detail", "kind", "command"),
    [
        ("BILLING_DISABLED", UnpaidError, "gcloud billing projects link"),
        ("SERVICE_DISABLED", DisabledError, "gcloud services enable compute.googleapis.com"),
        ("IAM_PERMISSION_DENIED", AuthError, "broker check gcp"),
        ("SOMETHING_NEW", AuthError, "broker check gcp"),
    ],
)
def test_the_newer_reason_is_more_specific_than_the_older(detail: str, kind: type[CloudError], command: str) -> None:
    error = translate(answer(403, "forbidden", "no", detail=detail), does_change=True)
    assert type(error) is kind
    assert len(error.hints) == 1 and command in error.hints[0]


def test_an_exceeded_quota_is_named_as_the_console_names_it() -> None:
    quota = {"limit_name": "GPUS-PER-GPU-FAMILY-per-project-region", "metric_name": "compute.googleapis.com/gpus"}
    dimensions = {"gpu_family": "NVIDIA_H100", "region": "us-central1"}
    details = {"quota_info": {**quota, "dimensions": dimensions, "limit": 0.0}}
    error = {"code": "QUOTA_EXCEEDED", "message": "Quota exceeded.", "error_details": [details]}
    operation = compute_v1.Operation({"error": {"errors": [error]}})
    found = errors.read_operation_error(operation)
    assert isinstance(found, QuotaError)
    assert "filter `GPUS-PER-GPU-FAMILY-per-project-region`, gpu_family NVIDIA_H100" in found.hints[0]


def test_an_unknown_code_is_never_a_success() -> None:
    assert isinstance(make_error("SOMETHING_NEW", "odd"), TransientError)
    assert isinstance(make_error("somethingNew", "odd", status=400), InvalidRequestError)
