"""AWS's error codes as our error classes: one table; message text is never matched.

Codes: EC2 API reference, "Error codes"; Service Quotas, SSM, STS and IAM references, "Errors". Names that end in
`Error` are botocore's own exceptions, for responses that never came.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

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

Kind = Literal["capacity", "quota", "login", "forbidden", "throttled", "invalid", "transient", "unknown"]

CODES: dict[Kind, tuple[str, ...]] = {
    "capacity": (
        *("InsufficientInstanceCapacity", "InsufficientCapacity", "InsufficientHostCapacity"),
        *("InsufficientReservedInstanceCapacity", "UnfulfillableCapacity", "SpotMaxPriceTooLow"),
        *("InsufficientFreeAddressesInSubnet", "InsufficientAddressCapacity", "InsufficientVolumeCapacity"),
        *("InsufficientCapacityOnOutpost", "InsufficientCapacityOnHost", "ReservationCapacityExceeded"),
        *("InsufficientReservedInstancesCapacity", "IncompatibleHostRequirements"),
        "InvalidPlacementGroup.InUse",  # by machines in another zone that have not ended yet
        # The zone lacks this machine type, or this is an account's first use of a region, which Amazon reviews.
        *("Unsupported", "PendingVerification"),
    ),
    "quota": (
        *("VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded", "VolumeLimitExceeded"),
        *("MaxIOPSLimitExceeded", "SecurityGroupLimitExceeded", "RulesPerSecurityGroupLimitExceeded"),
        *("NetworkInterfaceLimitExceeded", "MaxTemplateLimitExceeded", "MaxTemplateVersionLimitExceeded"),
        *("PlacementGroupLimitExceeded", "MaxSpotFleetRequestCountExceeded", "MaxScheduledInstanceCapacityExceeded"),
        *("QuotaExceededException", "ResourceLimitExceeded", "TagLimitExceeded", "HostLimitExceeded"),
        *("AddressLimitExceeded", "LimitExceeded"),
    ),
    "login": (
        *("AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException", "SignatureDoesNotMatch"),
        *("IncompleteSignature", "IncompleteSignatureException", "MissingAuthenticationToken", "ExpiredToken"),
        *("MissingAuthenticationTokenException", "ExpiredTokenException", "RequestExpired", "NotAuthorized"),
        *("Blocked", "OptInRequired", "NoCredentialsError", "PartialCredentialsError", "AccountProblem"),
        *("CredentialRetrievalError", "TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError"),
        *("ProfileNotFound", "ConfigParseError", "LoginRefreshRequired", "SSOError", "MetadataRetrievalError"),
        *("InvalidSignatureException", "RequestTimeTooSkewed", "InvalidConfigError", "LoginTokenLoadError"),
    ),
    "forbidden": (
        *("UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "DependencyAccessDeniedException"),
        *("RegionDisabledException", "TagPolicyViolation", "TagPolicyViolationException", "InvalidKeyId"),
        "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
    ),
    "throttled": (
        *("RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException"),
        "ThrottledException",
        *("RequestThrottled", "RequestThrottledException", "PriorRequestNotComplete", "EC2ThrottledException"),
        *("ProvisionedThroughputExceededException", "SlowDown", "BandwidthLimitExceeded"),
    ),
    "invalid": (
        *("UnsupportedOperation", "UnsupportedTenancy", "UnsupportedHibernationConfiguration"),
        *("InvalidParameter", "InvalidParameterValue", "InvalidParameterCombination", "InvalidParameterDependency"),
        *("MissingParameter", "UnknownParameter", "ValidationError", "ValidationException", "MalformedQueryString"),
        *("InvalidAMIID.Malformed", "InvalidAMIID.NotFound", "InvalidAMIID.Unavailable", "InvalidAction"),
        *("InvalidSubnetID.NotFound", "InvalidSubnetID.Malformed", "InvalidVpcID.NotFound", "InvalidVpcID.Malformed"),
        *("VPCIdNotSpecified", "DefaultVpcDoesNotExist", "MissingInput", "InvalidInput", "InvalidCharacter"),
        *("InvalidUserData.Malformed", "InvalidBlockDeviceMapping", "InvalidTagKey.Malformed", "InvalidTag"),
        *("InvalidZone.NotFound", "InvalidAvailabilityZone", "InvalidInstanceType", "InvalidInput.InstanceType"),
        *("IdempotentParameterMismatch", "IdempotentInstanceTerminated", "InvalidFleetConfiguration"),
        *("InvalidLaunchTemplateName.AlreadyExistsException", "InvalidLaunchTemplateName.MalformedException"),
        *("InvalidLaunchTemplateId.Malformed", "InvalidLaunchTemplateId.VersionNotFound", "InvalidState"),
        *("InvalidGroup.Duplicate", "InvalidGroup.InUse", "InvalidGroup.Reserved", "InvalidGroupId.Malformed"),
        *("InvalidPermission.Duplicate", "InvalidPermission.Malformed", "InvalidPermission.NotFound"),
        *("InvalidPlacementGroup.Duplicate", "InvalidSecurity.RequestHasExpired"),
        *("IncorrectInstanceState", "IncorrectState", "IncorrectSpotRequestState", "InvalidInstanceID.Malformed"),
        *("InvalidInstanceID.NotLinkable", "InvalidID", "OperationNotPermitted", "InvalidNetworkInterface.InUse"),
        *("InvalidIamInstanceProfileName.NotFound", "InvalidKeyPair.NotFound", "InvalidPaginationToken"),
        "InvalidPaginationTokenException",
        *("ParameterNotFound", "ParameterVersionNotFound", "NoSuchResourceException", "ParamValidationError"),
        *("IllegalArgumentException", "InvalidResourceStateException", "UnknownOperationException"),
        *("ResourceAlreadyExists", "EncryptedVolumesNotSupported", "InvalidOptionException", "InvalidRequest"),
        *("EntityAlreadyExists", "NoSuchEntity", "DeleteConflict", "MalformedPolicyDocument"),
        *("MissingAction", "InvalidQueryParameter", "UnsupportedInstanceAttribute", "UnsupportedProtocol"),
        *("FilterLimitExceeded", "BootForVolumeTypeUnsupported", "CustomerKeyHasBeenRevoked", "InvalidHostState"),
        *("InvalidSpotMaxPrice", "InvalidInterface.IpAddressLimitExceeded", "NoRegionError", "InvalidRegionError"),
    ),
    "transient": (
        *("Unavailable", "ServiceUnavailable", "ServiceUnavailableException", "ServerInternal", "ServiceException"),
        *("InvalidGroup.NotFound", "InvalidPlacementGroup.Unknown", "InvalidInstanceID.NotFound"),
        *("InvalidLaunchTemplateId.NotFound", "InvalidLaunchTemplateName.NotFoundException", "InvalidVolume.NotFound"),
        *("DependencyViolation", "EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError", "SSLError"),
        *("InternalServerError", "ConnectionError", "ConcurrentTagAccess"),
        *("ConcurrentModification", "EntityTemporarilyUnmodifiable", "ServiceFailure"),
    ),
    "unknown": (
        *("InternalError", "InternalFailure", "RequestAborted", "ReadTimeoutError", "ConnectionClosedError"),
        *("IncompleteReadError", "ResponseParserError", "HTTPClientError", "ResponseStreamingError"),
    ),
}  # fmt: skip
KINDS: dict[str, Kind] = {code: kind for kind, codes in CODES.items() for code in codes}
CLASSES: dict[Kind, type[CloudError]] = {
    "capacity": CapacityError,
    "quota": QuotaError,
    "login": AuthError,
    "forbidden": DeniedError,  # in that region: service control policies commonly allow some regions only
    "throttled": ThrottledError,
    "invalid": InvalidRequestError,
    "transient": TransientError,
    "unknown": UnknownOutcomeError,
}
HINTS: dict[Kind, tuple[str, ...]] = {
    "capacity": (),  # the caller tries other places
    "quota": ("`broker check` shows the quotas and the command that requests more.",),
    "login": ("log in with `aws configure` or `aws sso login`, then run `broker check`",),
    "forbidden": (
        "`broker check --policy aws` prints the required permissions.",
        "if an organisation's policy allows only some regions, list them in `aws.toml`: `regions = [...]`",
    ),
    "throttled": ("AWS limits the rate of requests; broker retries automatically",),
    "invalid": (),
    "transient": (),
    "unknown": ("`broker status` shows what was created.",),
}


REGION_WIDE = frozenset({"PendingVerification"})  # all other capacity errors concern one zone
SET_CLOCK = ("correct this machine's clock: AWS rejects signatures that are minutes off",)
OWN_HINTS: dict[str, tuple[str, ...]] = {  # where the hint of the kind would be wrong
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": (
        "ask an administrator to run `aws iam create-service-linked-role --aws-service-name spot.amazonaws.com`, once",
    ),
    "Blocked": (
        "Amazon blocks new machines in this account; see the reason at https://console.aws.amazon.com/support",
    ),
    "AccountProblem": ("Amazon blocks new machines in this account: https://console.aws.amazon.com/support",),
    "InsufficientFreeAddressesInSubnet": (
        "name a VPC with larger subnets in `aws.toml`, or terminate unused machines",
    ),
    "InvalidAMIID.NotFound": ("an image belongs to one region: write `image_id: {us-east-1: ami-...}`, or omit it",),
    "OptInRequired": (
        "Sign the account up for EC2, or accept the terms of a Marketplace image: "
        "https://console.aws.amazon.com/marketplace.",
    ),
    "PendingVerification": ("wait for Amazon's email, up to four hours; other regions may be available already",),
    "RequestExpired": SET_CLOCK,
    "RequestTimeTooSkewed": SET_CLOCK,
    "Unsupported": (
        "`aws ec2 describe-instance-type-offerings --location-type availability-zone` lists the zones that offer it.",
    ),
}
MESSAGE_MAX = 300  # characters; an IAM denial adds a thousand that are encoded


class ApiError(Exception):
    """An error response. `code` is AWS's, or the name of botocore's exception if there was no response."""

    def __init__(self, code: str, message: str, *, operation: str, region: str, status: int = 0) -> None:
        super().__init__(f"{operation}: {code}")
        self.code = code
        self.message = message
        self.operation = operation
        self.region = region
        self.status = status


def find_kind(code: str, status: int = 0) -> Kind:
    """Classify a code; an unlisted one by its suffix and HTTP status."""
    kind = KINDS.get(code)
    if kind is not None:
        return kind
    if code.endswith("LimitExceeded"):
        return "quota"  # the suffix of all EC2 quotas; its two exceptions are in the table
    if status == 429:
        return "throttled"
    return "unknown" if status >= 500 or status == 0 else "invalid"


def translate(refusal: ApiError, *, is_create: bool = False) -> CloudError:
    """Translate an error. If nothing can have been created, a missing response is merely transient."""
    kind = find_kind(refusal.code, refusal.status)
    if kind == "unknown" and not is_create:
        kind = "transient"
    text = refusal.message.rstrip(".")
    text = text if len(text) <= MESSAGE_MAX else f"{text[:MESSAGE_MAX]}..."
    message = f"{refusal.code}: {text} ({refusal.operation}, {refusal.region})"
    hints = OWN_HINTS.get(refusal.code, HINTS[kind])
    if kind == "capacity":
        return CapacityError(message, scope="region" if refusal.code in REGION_WIDE else "zone", hints=hints)
    return CLASSES[kind](message, hints=hints)


@contextmanager
def translated(*, is_create: bool = False) -> Iterator[None]:
    """Translate every exception that leaves the adapter into one of our classes."""
    try:
        yield
    except ApiError as refusal:
        raise translate(refusal, is_create=is_create) from refusal
