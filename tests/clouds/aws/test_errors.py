"""Each of AWS's codes is classified as documented, through real boto3."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from broker.clouds.aws.errors import CLASSES, CODES, HINTS, KINDS, OWN_HINTS, ApiError, find_kind, translate
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
from tests.clouds.aws.bed import AwsBed
from tests.clouds.beds import make_node
from tests.clouds.contract import OWNER, count_living, make_request, settle
from tests.testbed import ec2_account
from tests.tiers import spread

# From the EC2 API reference, "Error codes": those that our calls can return, with their HTTP status.
DOCUMENTED: dict[type[CloudError], dict[str, int]] = {
    CapacityError: {
        "InsufficientInstanceCapacity": 500,
        "InsufficientCapacity": 500,
        "InsufficientHostCapacity": 500,
        "InsufficientReservedInstanceCapacity": 500,
        "InsufficientVolumeCapacity": 500,
        "InsufficientAddressCapacity": 500,
        "InsufficientFreeAddressesInSubnet": 400,
        "InsufficientCapacityOnHost": 400,
        "SpotMaxPriceTooLow": 400,
        "UnfulfillableCapacity": 400,
        "Unsupported": 500,
    },
    QuotaError: {
        "VcpuLimitExceeded": 400,
        "InstanceLimitExceeded": 400,
        "MaxSpotInstanceCountExceeded": 400,
        "MaxIOPSLimitExceeded": 400,
        "VolumeLimitExceeded": 400,
        "NetworkInterfaceLimitExceeded": 400,
        "SecurityGroupLimitExceeded": 400,
        "RulesPerSecurityGroupLimitExceeded": 400,
        "TagLimitExceeded": 400,
        "SomethingNewLimitExceeded": 400,
    },
    AuthError: {
        "AuthFailure": 401,
        "Blocked": 403,
        "IncompleteSignature": 400,
        "InvalidClientTokenId": 403,
        "MissingAuthenticationToken": 403,
        "OptInRequired": 403,
        "AccountProblem": 400,
        "RequestExpired": 400,
        "ExpiredToken": 400,
        "SignatureDoesNotMatch": 403,
    },
    DeniedError: {
        "UnauthorizedOperation": 403,  # also an explicit deny, and a service control policy
        "AccessDenied": 403,
        "AuthFailure.ServiceLinkedRoleCreationNotPermitted": 403,
    },
    ThrottledError: {"RequestLimitExceeded": 503, "Throttling": 400, "SomethingNew": 429},
    InvalidRequestError: {
        "UnsupportedOperation": 400,
        "InvalidParameter": 400,
        "InvalidParameterValue": 400,
        "InvalidParameterCombination": 400,
        "InvalidQueryParameter": 400,
        "MalformedQueryString": 404,
        "MissingAction": 400,
        "MissingParameter": 400,
        "UnknownParameter": 400,
        "ValidationError": 400,
        "InvalidAMIID.NotFound": 400,
        "InvalidSubnetID.NotFound": 400,
        "InvalidBlockDeviceMapping": 400,
        "EncryptedVolumesNotSupported": 400,
        "InvalidUserData.Malformed": 400,
        "FilterLimitExceeded": 400,
        "SomethingNew": 400,
    },
    TransientError: {
        "Unavailable": 503,
        "ServiceUnavailable": 503,
        "ServerInternal": 500,
        "InvalidGroup.NotFound": 400,
        "InvalidPlacementGroup.Unknown": 400,
    },
    UnknownOutcomeError: {"InternalError": 500, "InternalFailure": 500, "SomethingNew": 500},
}  # fmt: skip


# Calls of services whose model lists their errors; all other calls are EC2's.
CALLED = (("ssm", "GetParameter"), ("service-quotas", "GetServiceQuota"), ("service-quotas", "ListServiceQuotas"))


def test_no_code_means_two_things() -> None:
    counts = Counter(code for codes in CODES.values() for code in codes)
    assert [code for code, count in counts.items() if count > 1] == []
    assert set(CLASSES) == set(CODES) == set(HINTS)


def test_table_knows_every_code_that_the_fake_plays() -> None:
    folder = Path(ec2_account.__file__).parent
    text = "".join(path.read_text() for path in folder.glob("ec2*.py"))
    played = set(re.findall(r'ApiError\(\s*"([^"]+)"', text))
    assert len(played) > 20
    assert played - set(KINDS) == {"DryRunOperation"}  # which is not an error


def test_table_knows_botocores_exceptions_of_login_and_transport() -> None:
    from botocore import exceptions

    ours = {code for code in KINDS if code.endswith("Error") or code == "ProfileNotFound"}
    theirs = {name for name in vars(exceptions) if name in ours}
    assert {
        *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"),
        *("SSOTokenLoadError", "UnauthorizedSSOTokenError", "ProfileNotFound", "ReadTimeoutError", "SSLError"),
        *("ConnectTimeoutError", "EndpointConnectionError", "ConnectionClosedError", "HTTPClientError"),
        *("ParamValidationError", "NoRegionError"),
    } <= theirs


def test_table_knows_every_code_that_botocores_service_models_list_for_our_calls() -> None:
    """EC2's model lists none per operation: its waiters and the retry rules name some."""
    from botocore.session import get_session

    session = get_session()  # type: ignore[no-untyped-call]
    listed: set[str] = set()
    for service, operation in CALLED:
        model = session.get_service_model(service).operation_model(operation)
        listed |= {shape.error_code for shape in model.error_shapes}
    loader = session.get_component("data_loader")
    for name in (
        "InstanceExists",
        "InstanceRunning",
        "ImageExists",
        "SecurityGroupExists",
        "VolumeDeleted",
        "VpcExists",
    ):
        waiter = loader.load_service_model("ec2", "waiters-2")["waiters"][name]
        listed |= {each["expected"] for each in waiter["acceptors"] if each["matcher"] == "error"}
    retried = loader.load_data("_retry")
    policies = [*retried["definitions"].values(), *retried["retry"]["ec2"]["__default__"]["policies"].values()]
    answers = [each["applies_when"].get("response", {}) for each in policies]
    listed |= {each["service_error_code"] for each in answers if "service_error_code" in each}
    assert {"AccessDeniedException", "ParameterNotFound", "RequestLimitExceeded", "InvalidGroup.NotFound"} <= listed
    assert listed - set(KINDS) == set()


@pytest.mark.parametrize("wanted", spread(list(DOCUMENTED), every=2), ids=lambda wanted: wanted.__name__)
def test_documented_code_of_a_launch_becomes_our_class_and_leaves_nothing(
    bed: AwsBed, wanted: type[CloudError]
) -> None:
    async def act() -> None:
        for code, status in DOCUMENTED[wanted].items():
            bed.account.fail("RunInstances", code, status=status)
            with pytest.raises(CloudError) as caught:
                await bed.cloud.create_nodes(make_request(bed))
            assert type(caught.value) is wanted, code
            assert code in caught.value.message or wanted is QuotaError
            assert caught.value.hints or wanted in (CapacityError, InvalidRequestError, TransientError), code
            if isinstance(caught.value, CapacityError):
                assert caught.value.scope == "zone"
        assert sum(bed.account.fault_counts.values()) == len(DOCUMENTED[wanted])
        assert await count_living(bed) == 0

    bed.run(act())


def test_launch_is_sent_once_and_a_read_several_times(bed: AwsBed) -> None:
    """botocore would retry a launch itself; the caller must decide what a missing response means."""
    bed.account.fail("RunInstances", "Unavailable", status=503)
    bed.account.fail("DescribeSubnets", "Unavailable", status=503)

    async def act() -> None:
        with pytest.raises(TransientError):
            await bed.cloud.create_nodes(make_request(bed))

    bed.run(act())
    names = [action for action, _, _ in bed.account.calls]
    assert names.count("ec2:RunInstances") == 1
    assert names.count("ec2:DescribeSubnets") == 2


@pytest.mark.parametrize("verb", ["list_nodes", "terminate_nodes"])
def test_lost_answer_of_what_may_be_repeated_is_transient(bed: AwsBed, verb: str) -> None:
    async def act() -> None:
        (node,) = await bed.cloud.create_nodes(make_request(bed))
        await settle(bed)
        bed.account.lose_answer("DescribeInstances", times=50)
        bed.account.lose_answer("TerminateInstances", times=50)
        with pytest.raises(TransientError):
            await (bed.cloud.list_nodes(OWNER) if verb == "list_nodes" else bed.cloud.terminate_nodes([node]))

    bed.run(act())


def test_refused_connection_is_transient_and_a_missing_login_an_auth_error(
    bed: AwsBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act() -> None:
        bed.aws.close()
        with pytest.raises(TransientError):
            await bed.cloud.terminate_nodes([make_node("i-0123456789abcdef0")])
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        with pytest.raises(AuthError) as caught:
            await bed.reopen().check()
        assert "aws configure" in caught.value.hints[0]

    bed.run(act())


def test_region_that_amazon_still_reviews_is_left_for_others(bed: AwsBed) -> None:
    """An account's first launch in a region may be under review; regions already in use stay open."""
    bed.account.fail("RunInstances", "PendingVerification")

    async def act() -> None:
        with pytest.raises(CapacityError) as caught:
            await bed.cloud.create_nodes(make_request(bed))
        assert caught.value.scope == "region"
        assert "four hours" in caught.value.hints[0]

    bed.run(act())


@pytest.mark.parametrize("code", list(OWN_HINTS))
def test_error_that_a_login_cannot_fix_has_no_hint_to_log_in(code: str) -> None:
    refusal = ApiError(code, "?", operation="run_instances", region="us-east-1")
    assert code in KINDS
    hints = " ".join(translate(refusal, is_create=True).hints)
    assert hints and "aws configure" not in hints and "--policy" not in hints


def test_refusal_by_iam_is_cut_to_what_can_be_read() -> None:
    refusal = ApiError("UnauthorizedOperation", "x" * 1500, operation="run_instances", region="us-east-1")
    assert len(translate(refusal).message) < 400


def test_unlisted_code_without_a_status_is_an_unknown_outcome_for_a_create_only() -> None:
    assert find_kind("UnknownFaultError") == "unknown"
    refusal = ApiError("UnknownFaultError", "?", operation="run_instances", region="us-east-1")
    assert type(translate(refusal, is_create=True)) is UnknownOutcomeError
    assert type(translate(refusal)) is TransientError
