"""Access to S3: short-lived STS sessions, limited to a task's keys, as files that AWS's own libraries reread."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NoReturn

from broker.access import aws_user
from broker.access.base import FOLDER, Grant, Need
from broker.access.kept import KeptKeys, name_needs
from broker.access.s3_policy import make_policy
from broker.clock import Clock
from broker.clouds.aws.errors import find_kind
from broker.clouds.aws.settings import Settings, load_settings
from broker.config import Config
from broker.environment import read_aws_environment
from broker.errors import AccountError, AuthError, CloudError, InvalidRequestError, TransientError
from broker.storage.s3 import find_region
from broker.types import Secret, Task

# STS API reference: GetFederationToken at most 36 h; AssumeRole at most 12 h if the role allows it, and 1 h if the
# caller is itself a role ("role chaining").
FEDERATION_S, ROLE_S, CHAINED_S = 129_600, 43_200, 3_600
RENEW_S = 3600.0  # renewed hourly, a 36 h session has at least 35 h remaining when this machine becomes unavailable
PROPAGATION_S, PAUSE_S = 90.0, 3.0  # IAM User Guide: changes are "eventually consistent"; usually seconds
NEW_KEY = "InvalidAccessKeyId"  # S3's error for a key that is not known yet
NAME_LENGTH_MAX = 32  # of a federated user
OWN_VARIABLES = (
    *("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SHARED_CREDENTIALS_FILE"),
    *("AWS_CONFIG_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
)
KEYS = "or give the program its own keys: `secrets: {AWS_ACCESS_KEY_ID: , AWS_SECRET_ACCESS_KEY: }`"
LOGIN = "log in with `aws configure`, or `aws sso login`"
PROFILE = "or name an instance profile for nodes on AWS: `instance_profile` in `aws.toml` in the state folder"
ROLE = 'name a role that may use the bucket: `bucket_role = "arn:aws:iam::ACCOUNT:role/NAME"` in `aws.toml`'
USER_POLICY = "allow `sts:GetFederationToken` for your IAM user (docs/BUCKET_ACCESS.md has the policy)"
Caller = Literal["user", "role", "root", "federated"]


def make_granter(config: Config, *, clock: Clock) -> S3Granter:
    """Return the granter of this scheme; it contacts the cloud on first use."""
    return S3Granter(load_settings(config.home), config, clock=clock)


class S3Granter:
    """Implement `Granter` for S3."""

    def __init__(
        self, settings: Settings, config: Config, *, clock: Clock, open_session: Callable[[], Any] | None = None
    ) -> None:
        self._settings, self._clock, self._owner = settings, clock, config.owner
        self._name = f"broker-{config.owner}"[:NAME_LENGTH_MAX]
        self._kept = KeptKeys(config.home, "s3")
        self._is_fresh = False  # whether a user is new, because IAM takes seconds to propagate it
        self._open_session = open_session or _open_session
        self._regions: dict[str, str] = {}

    def find_own(self, task: Task, cloud: str) -> str:
        """Return the task's own credentials, or the instance profile of an AWS node; "" without either."""
        if name := next(
            (variable for variable in OWN_VARIABLES if variable in task.secrets or variable in task.envs), ""
        ):
            return f"the task's own `{name}`"
        if any(target.strip("/").startswith("~/.aws") for target in task.file_mounts):
            return "the task's own `~/.aws`"
        if cloud == "aws" and self._settings.instance_profile:
            return f"the instance profile `{self._settings.instance_profile}`"
        return ""

    def issue(self, needs: Sequence[Need], *, endpoint: str = "") -> Grant:
        """Issue a session or user limited to the task's paths. Raises AuthError, with alternatives as hints."""
        variables = read_aws_environment()
        own_endpoint = variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL") or ""
        has_sts = bool(variables.get("AWS_ENDPOINT_URL_STS") or variables.get("AWS_ENDPOINT_URL"))
        endpoint = endpoint or own_endpoint
        if endpoint and not (has_sts and endpoint == own_endpoint):
            raise AuthError(
                f"broker cannot grant short-lived access to the S3 service at `{endpoint}`",
                hints=("give the program its own keys: `secrets: {AWS_ACCESS_KEY_ID: , AWS_SECRET_ACCESS_KEY: }`",),
            )
        issued_s = self._clock.now_s()
        login, expires_s, by = self._create_login(needs)
        region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") if endpoint else None
        region = region or ("us-east-1" if endpoint else self._find_region(needs))
        envs = {"AWS_CONFIG_FILE": f"{FOLDER}/aws_config", "AWS_SHARED_CREDENTIALS_FILE": f"{FOLDER}/aws_config"}
        if endpoint:
            envs["AWS_ENDPOINT_URL_S3"] = endpoint
        return Grant(
            files={
                "aws.json": Secret(value=json.dumps(login)),
                "aws_config": Secret(value=_write_config(region)),
            },
            envs={**envs, "AWS_SDK_LOAD_CONFIG": "1"},  # Go's older SDK does not read the config file without it
            issued_s=issued_s,
            expires_s=expires_s,
            renew_s=issued_s + min(RENEW_S, (expires_s - issued_s) / 4),
            by=by,
        )

    def prove(self, need: Need, grant: Grant) -> None:
        """Prove access by writing and deleting an empty object, or by listing one key."""
        from botocore.exceptions import BotoCoreError, ClientError

        give_up_s = self._clock.now_s() + (PROPAGATION_S if self._is_fresh else 0.0)
        while True:
            try:
                self._use(need, json.loads(grant.files["aws.json"].value))
                return
            except (ClientError, BotoCoreError) as error:
                is_waiting = find_kind(_find_code(error)) in ("login", "forbidden") or _find_code(error) == NEW_KEY
                if not is_waiting or self._clock.now_s() >= give_up_s:
                    verb = "write to" if need.is_written else "read"
                    _refuse(error, f"{grant.by} cannot {verb} `{need.url}`", _find_hints(error, need))
            asyncio.run(self._clock.sleep(PAUSE_S))

    def _use(self, need: Need, login: dict[str, str]) -> None:
        from botocore.config import Config as ClientConfig

        client = self._open_session().client(
            "s3", region_name=self._find_region([need]), aws_access_key_id=login["AccessKeyId"],
            aws_secret_access_key=login["SecretAccessKey"], aws_session_token=login.get("SessionToken"),
            config=ClientConfig(connect_timeout=10, read_timeout=20, retries={"total_max_attempts": 3}),
        )  # fmt: skip
        if need.is_written:
            client.put_object(Bucket=need.bucket, Key=need.find_probe(), Body=b"")
            client.delete_object(Bucket=need.bucket, Key=need.find_probe())
        else:
            prefix = {"Prefix": need.list_patterns()[0].rstrip("*")} if need.path else {}
            client.list_objects_v2(Bucket=need.bucket, MaxKeys=1, **prefix)

    def _create_login(self, needs: Sequence[Need]) -> tuple[dict[str, Any], float, str]:
        """Return the login in the format of `credential_process`, its expiry time, and the granting principal."""
        session = self._open_session()
        from botocore.exceptions import BotoCoreError, ClientError

        caller: Caller = "user"
        refusal: Exception | None = None
        try:
            region = session.region_name or "us-east-1"
            sts = session.client("sts", region_name=region)
            arn = str(sts.get_caller_identity()["Arn"])
            policy = make_policy(needs, partition=arn.split(":")[1])
            caller = read_caller(arn)
            if self._settings.bucket_role:
                return *_read_session(self._assume(sts, policy, caller)), f"the role `{self._settings.bucket_role}`"
            if caller == "user":
                try:
                    answer = sts.get_federation_token(Name=self._name, Policy=policy, DurationSeconds=FEDERATION_S)
                    return *_read_session(answer), f"your IAM user `{arn.rpartition('/')[2]}`"
                except ClientError as error:
                    refusal = error
                    if not _is_forbidden(error):
                        raise
            if caller in ("user", "role"):  # a user's MFA session cannot federate either
                return self._renew_user(session.client("iam", region_name=region), policy, arn.split(":")[4], needs)
        except (ClientError, BotoCoreError) as error:
            what = "AWS does not grant nodes access to the task's buckets"
            forbidden = (ROLE,) if self._settings.bucket_role or caller == "role" else (USER_POLICY,)
            _refuse(refusal or error, what, (*forbidden, PROFILE, KEYS) if _is_forbidden(error) else (LOGIN, KEYS))
        raise AuthError(f"{WHY_NOT[caller]} (`{arn}`)", hints=(ROLE, PROFILE, KEYS))

    def _assume(self, sts: Any, policy: str, caller: Caller) -> Any:
        """Assume the role for the longest time that it allows; an hour is always allowed."""
        from botocore.exceptions import ClientError

        request = {"RoleArn": self._settings.bucket_role, "RoleSessionName": self._name, "Policy": policy}
        if caller == "user":
            try:
                return sts.assume_role(**request, DurationSeconds=ROLE_S)
            except ClientError as error:  # the role's own maximum is shorter
                if _find_code(error) != "ValidationError":
                    raise
        return sts.assume_role(**request, DurationSeconds=CHAINED_S)

    def _renew_user(
        self, iam: Any, policy: str, account: str, needs: Sequence[Need]
    ) -> tuple[dict[str, Any], float, str]:
        """Use a user created by broker: its key is kept, and its policy is rewritten with a later expiry."""
        name = name_needs(self._owner, account, needs)
        user = f"broker-{name}"
        now_s = self._clock.now_s()
        with self._kept.locked():
            kept = self._kept.read(name)
            end_s = now_s + aws_user.LIFE_S
            is_new = aws_user.ensure_user(iam, user, owner=self._owner, policy=policy, end_s=end_s)
            if kept is None or is_new:  # the user may have been deleted by hand, and the kept key with it
                kept = {"issued_s": now_s, "account": account, "key": aws_user.make_key(iam, user)}
                self._kept.write(name, kept)
                self._is_fresh = True
        return {"Version": 1, **kept["key"]}, now_s + aws_user.LIFE_S, f"the IAM user `{user}`, which broker created"

    def sweep(self) -> int:
        """Delete broker's own users with their keys; return their number.

        Users in an account other than that of the login are kept, and named in an error.
        """
        names = self._kept.list_names()
        if not names:
            return 0
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            session = self._open_session()
            region = session.region_name or "us-east-1"
            iam = session.client("iam", region_name=region)
            account = str(session.client("sts", region_name=region).get_caller_identity()["Account"])
            left: dict[str, str] = {}
            with self._kept.locked():
                for name in names:
                    home = (self._kept.read(name) or {}).get("account", account)
                    if home != account:
                        left[f"broker-{name}"] = home
                        continue
                    aws_user.delete_user(iam, f"broker-{name}")
                    self._kept.forget(name)
        except (ClientError, BotoCoreError) as error:
            _refuse(error, "cannot delete the IAM users that broker created", (LOGIN,))
        if left:
            found = ", ".join(f"`{user}` in account {home}" for user, home in left.items())
            raise AccountError(f"these IAM users are in another account: {found}", hints=(LOGIN,))
        return len(names)

    def _find_region(self, needs: Sequence[Need]) -> str:
        bucket = next((need.bucket for need in needs if need.is_written), needs[0].bucket)
        variables = read_aws_environment()
        if variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL"):
            return variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or "us-east-1"
        if bucket not in self._regions:
            self._regions[bucket] = find_region(bucket) or "us-east-1"
        return self._regions[bucket]


WHY_NOT: dict[Caller, str] = {
    "role": "your AWS login is a role, which cannot issue sessions",
    "root": "your AWS login is the account's root user, which must never be passed to nodes",
    "federated": "your AWS login is a federated session, which cannot grant further access",
    "user": "your AWS login cannot grant access",
}


def read_caller(arn: str) -> Caller:
    """Return the kind of caller that an ARN names, for example `user`, `assumed-role`, `root` or `federated-user`.

    The ARNs are `arn:aws:iam::1:user/x`, `arn:aws:sts::1:assumed-role/r/s`, `arn:aws:iam::1:root` and
    `...:federated-user/x`.
    """
    kind = arn.split(":", 5)[5].partition("/")[0]
    kinds: dict[str, Caller] = {"user": "user", "root": "root", "federated-user": "federated"}
    return kinds.get(kind, "role")


def _read_session(answer: Any) -> tuple[dict[str, Any], float]:
    credentials = answer["Credentials"]
    expires_s = float(credentials["Expiration"].timestamp())
    names = ("AccessKeyId", "SecretAccessKey", "SessionToken")
    end = datetime.fromtimestamp(expires_s, UTC).isoformat()
    return {"Version": 1, **{name: credentials[name] for name in names}, "Expiration": end}, expires_s


def _write_config(region: str) -> str:
    """Return a config with a credential process, which libraries rerun before expiry to read the renewed file."""
    lines = ("[default]", f'credential_process = cat "{FOLDER}/aws.json"', f"region = {region}")
    return "\n".join(lines) + "\n"


def _open_session() -> Any:
    try:
        import boto3
    except ImportError as error:
        raise AuthError(
            "granting nodes access to `s3://` requires the package boto3",
            hints=("pip install 'intercloud-broker[aws]'", KEYS),
        ) from error
    return boto3.Session()


def _find_code(error: Exception) -> str:
    """Return AWS's code, or the name of botocore's exception if there was no response."""
    response = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code") or type(error).__name__)


def _is_forbidden(error: Exception) -> bool:
    return find_kind(_find_code(error)) == "forbidden"


def _find_hints(error: Exception, need: Need) -> tuple[str, ...]:
    if _find_code(error) == "NoSuchBucket":
        return (f"create it with `aws s3 mb s3://{need.bucket}`", f"or correct `{need.source}`")
    return ("allow your own login to use the bucket: a grant cannot exceed its creator's permissions", PROFILE, KEYS)


def _refuse(error: Exception, what: str, hints: tuple[str, ...]) -> NoReturn:
    """Raise one of our errors, chosen by AWS's code."""
    code = _find_code(error)
    kind = "invalid" if code == "NoSuchBucket" else find_kind(code)
    classes: dict[str, type[CloudError]] = {"login": AuthError, "forbidden": AuthError, "invalid": InvalidRequestError}
    raise classes.get(kind, TransientError)(f"{what}: {code}", hints=hints) from error
