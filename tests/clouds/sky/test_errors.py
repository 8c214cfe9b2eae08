"""Each SkyPilot error leads to an action of broker. tests/sky compares the table with SkyPilot itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from broker.clouds.sky.errors import KINDS, SkyError, shorten, translate
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


def unavailable(*history: SkyError) -> SkyError:
    return SkyError(type="ResourcesUnavailableError", message="Failed to acquire resources", history=tuple(history))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (unavailable(), CapacityError),
        (unavailable(SkyError(type="CloudError", codes=("QUOTA_EXCEEDED",))), QuotaError),
        (unavailable(SkyError(type="InvalidCloudCredentials", message="expired")), AuthError),
        (unavailable(SkyError(type="NotSupportedError", message="no ports")), InvalidRequestError),
        # a place without machines, and another that may be retried: neither ends the search
        (unavailable(SkyError(type="RuntimeError")), CapacityError),
        (unavailable(SkyError(type="ProvisionerError", codes=("VM_MIN_COUNT_NOT_REACHED",))), CapacityError),
        (SkyError(type="NoCloudAccessError"), AuthError),
        (unavailable(SkyError(type="CloudError", codes=("RequestDisallowedByPolicy",))), DeniedError),
        (SkyError(type="CloudError", codes=("HttpResponseError", "AuthorizationFailed")), DeniedError),
        (SkyError(type="NotForSaleError"), CapacityError),
        (SkyError(type="ValueError", message="Invalid instance type"), InvalidRequestError),
        (SkyError(type="ApiServerConnectionError"), TransientError),
        (SkyError(type="ConcurrentWorkerExhaustedError"), ThrottledError),
    ],
)
def test_errors_of_skypilot_are_distinguished(fault: SkyError, kind: type[CloudError]) -> None:
    for does_change in (False, True):
        assert type(translate(fault, does_change=does_change)) is kind


def test_unknown_outcomes_may_have_taken_effect() -> None:
    strange = SkyError(type="ReadTimeout", message="read timed out")
    assert type(translate(strange)) is TransientError
    assert type(translate(strange, does_change=True)) is UnknownOutcomeError


@pytest.mark.parametrize("kind", [AuthError, QuotaError])
def test_hints_say_what_to_do(kind: type[CloudError]) -> None:
    faults: Sequence[SkyError] = [SkyError(type=name) for name, found in KINDS.items() if found is kind]
    for fault in faults or [unavailable(SkyError(type="CloudError", codes=("quotaExceeded",)))]:
        assert translate(fault).hints


def test_a_message_is_one_line_without_colours() -> None:
    assert shorten("\x1b[31mNo room\x1b[0m in\n  us-east-1.\n\nA table follows\n---") == "No room in us-east-1"
    error = translate(
        unavailable(SkyError(type="CloudError", message="the place's own words", codes=("LimitExceeded",)))
    )
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
    fault = SkyError.parse(describe(CloudError(text)))
    assert fault.codes == ("RequestDisallowedByPolicy", "InvalidTemplateDeployment", "HttpResponseError")
    error = translate(fault)
    assert isinstance(error, DeniedError) and error.scope == "region" and error.hints


def test_errors_described_by_the_worker_are_parsed() -> None:
    found = SkyError.parse(
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
    assert found.history == (SkyError(type="CloudError", module="sky.exceptions", message="h", codes=("x",)),)
