"""Each fault of SkyPilot's leads to what broker can do about it. tests/sky holds the table against SkyPilot itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from broker.clouds.sky.faults import KINDS, Fault, shorten, translate
from broker.clouds.sky.worker import describe
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


def unavailable(*history: Fault) -> Fault:
    return Fault(type="ResourcesUnavailableError", message="Failed to acquire resources", history=tuple(history))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (unavailable(), CapacityError),
        (unavailable(Fault(type="CloudError", codes=("QUOTA_EXCEEDED",))), QuotaError),
        (unavailable(Fault(type="InvalidCloudCredentials", message="expired")), AuthError),
        (unavailable(Fault(type="NotSupportedError", message="no ports")), InvalidRequestError),
        # a place that is out of machines, and another that may be tried again: neither ends the search
        (unavailable(Fault(type="RuntimeError")), CapacityError),
        (unavailable(Fault(type="ProvisionerError", codes=("VM_MIN_COUNT_NOT_REACHED",))), CapacityError),
        (Fault(type="NoCloudAccessError"), AuthError),
        (unavailable(Fault(type="CloudError", codes=("RequestDisallowedByPolicy",))), DeniedError),
        (Fault(type="CloudError", codes=("HttpResponseError", "AuthorizationFailed")), DeniedError),
        (Fault(type="NotForSaleError"), CapacityError),
        (Fault(type="ValueError", message="Invalid instance type"), InvalidRequestError),
        (Fault(type="ApiServerConnectionError"), TransientError),
        (Fault(type="ConcurrentWorkerExhaustedError"), ThrottledError),
    ],
)
def test_faults_are_told_apart(fault: Fault, kind: type[CloudError]) -> None:
    for does_change in (False, True):
        assert type(translate(fault, does_change=does_change)) is kind


def test_what_is_not_known_may_have_had_its_effect() -> None:
    strange = Fault(type="ReadTimeout", message="read timed out")
    assert type(translate(strange)) is TransientError
    assert type(translate(strange, does_change=True)) is UnknownOutcomeError


@pytest.mark.parametrize("kind", [AuthError, QuotaError])
def test_who_must_act_is_told_how(kind: type[CloudError]) -> None:
    faults: Sequence[Fault] = [Fault(type=name) for name, found in KINDS.items() if found is kind]
    for fault in faults or [unavailable(Fault(type="CloudError", codes=("quotaExceeded",)))]:
        assert translate(fault).hints


def test_a_message_is_one_line_without_colours() -> None:
    assert shorten("\x1b[31mNo room\x1b[0m in\n  us-east-1.\n\nA table follows\n---") == "No room in us-east-1"
    error = translate(unavailable(Fault(type="CloudError", message="the place's own words", codes=("LimitExceeded",))))
    assert "the place's own words" in error.message


def test_the_cause_that_azure_names_below_its_envelope_is_found() -> None:
    class CloudError(Exception):  # as `sky.exceptions` wraps what Azure's library raises
        cloud_provider, error_type = "azure", "HttpResponseError"

    text = (
        "azure error (HttpResponseError): (InvalidTemplateDeployment) The template deployment failed.\n"
        "Code: InvalidTemplateDeployment\nMessage: The template deployment failed.\n"
        "Exception Details:\t(RequestDisallowedByPolicy) Resource 'vm' was disallowed by policy.\n"
        "\tCode: RequestDisallowedByPolicy\n\tMessage: Resource 'vm' was disallowed by policy.\n\tTarget: vm"
    )
    fault = Fault.parse(describe(CloudError(text)))
    assert fault.codes == ("RequestDisallowedByPolicy", "InvalidTemplateDeployment", "HttpResponseError")
    error = translate(fault)
    assert isinstance(error, DeniedError) and error.scope == "region" and error.hints


def test_what_the_worker_describes_is_understood() -> None:
    found = Fault.parse(
        {
            "type": "ResourcesUnavailableError",
            "module": "sky.exceptions",
            "message": "m",
            "codes": [],
            "history": [
                {"type": "CloudError", "module": "sky.exceptions", "message": "h", "codes": ["x"], "history": []}
            ],
        }
    )
    assert found.history == (Fault(type="CloudError", module="sky.exceptions", message="h", codes=("x",)),)
