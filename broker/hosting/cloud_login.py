"""The login that a server's machine has on its cloud: a role that broker creates, one that the user names, or none."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from broker.app.container import Context
from broker.errors import UsageError
from broker.hosting.record import HostedServer, MachineLogin

if TYPE_CHECKING:
    from broker.clouds.aws.server_role import ServerRoles
    from broker.clouds.aws.settings import Settings as AwsSettings
    from broker.clouds.gcp.settings import Settings as GcpSettings

NONE = "none"
OWN_ROLE_CLOUDS = ("aws",)
# Of the machine that broker runs on: the server has another address.
LEFT_OUT = ("ssh_from",)


def choose_login(
    cloud: str | None, *, role: str | None, buckets: Sequence[str], urls: Sequence[str | None], owner: str
) -> MachineLogin:
    """Choose by the options of `broker server up`. `cloud` None: the machine is the user's own.

    `buckets` are named by the user, `urls` are the locations that the server will use. Raises UsageError.
    """
    if cloud is None and (role is not None or buckets):
        raise UsageError("`--role` and `--bucket` require a machine on a cloud: `--infra aws` or `--infra gcp`")
    is_own = cloud in OWN_ROLE_CLOUDS and role is None
    if buckets and not is_own:
        raise UsageError(
            "`--bucket` requires a role that broker creates, which it does on AWS without `--role`",
            hints=["give the role or service account access to the bucket yourself"],
        )
    if not is_own:
        return MachineLogin(name="" if role in (None, NONE) else str(role))
    named = [read_bucket(each) for each in buckets]
    used = [urlsplit(url).netloc for url in urls if url is not None and url.startswith("s3://")]
    return MachineLogin(name=f"broker-server-{owner}", is_own=True, buckets=tuple(dict.fromkeys([*named, *used])))


def read_bucket(text: str) -> str:
    """Read `BUCKET` or `s3://BUCKET`. Raises UsageError."""
    bucket = text.removeprefix("s3://").rstrip("/")
    if not bucket or "/" in bucket or ":" in bucket:
        raise UsageError(f"invalid bucket `{text}`", hints=["name an S3 bucket: `--bucket NAME`"])
    return bucket


def set_identity(context: Context, server: HostedServer) -> None:
    """Give the login to the machine that will be created."""
    from broker.clouds.base import SetsIdentity

    if server.cluster is None or not server.login.name:
        return
    cloud = context.clouds.get(server.cloud)
    if isinstance(cloud, SetsIdentity):
        cloud.set_identity(server.cluster, server.login.name)


def ensure_login(context: Context, server: HostedServer, *, owner: str | None) -> None:
    """Create the role, if it is broker's own, or update its permissions. Raises BrokerError.

    `owner` is the server's ID, which tags its machines; None: before it has one, the role may only read, and use its
    buckets.
    """
    if not server.login.is_own:
        return
    from broker.clouds.aws.server_role import ServerRole
    from broker.clouds.aws.settings import load_settings

    role = ServerRole(
        name=server.login.name, created_by=context.config.owner, owner=owner, buckets=server.login.buckets,
        nodes_profile=load_settings(context.config.home).instance_profile,
    )  # fmt: skip
    asyncio.run(_open_roles(context).ensure(role))


def end_login(context: Context, server: HostedServer) -> None:
    """Delete a role that broker created; already gone is success. Raises BrokerError."""
    if server.login.is_own:
        asyncio.run(_open_roles(context).delete(server.login.name))


def _open_roles(context: Context) -> ServerRoles:
    from broker.clouds.aws.clients import Clients
    from broker.clouds.aws.server_role import ServerRoles

    return ServerRoles(Clients(), clock=context.clock)


def make_settings(context: Context, server: HostedServer) -> Mapping[str, str]:
    """Make the settings files of the machine's cloud for the server's state folder. Raises BrokerError.

    They are those of this machine, with a role that gives nodes access to buckets.
    """
    if server.cluster is None:
        return {}
    make = {"aws": _make_aws_settings, "gcp": _make_gcp_settings}[server.cloud]
    return {f"{server.cloud}.toml": make(context, server)}


def _make_aws_settings(context: Context, server: HostedServer) -> str:
    from broker.clouds.aws.settings import load_settings

    settings = load_settings(context.config.home)
    if server.login.is_own and server.login.buckets and settings.bucket_role is None:
        arn = asyncio.run(_open_roles(context).find_arn(server.login.name))
        settings = dataclasses.replace(settings, bucket_role=arn)
    return write_settings(settings)


def _make_gcp_settings(context: Context, server: HostedServer) -> str:
    from broker.clouds.gcp.login import find_login
    from broker.clouds.gcp.settings import load_settings

    settings = load_settings(context.config.home)
    login = find_login(settings)
    return write_settings(dataclasses.replace(settings, project=login.project if login else settings.project))


def write_settings(settings: AwsSettings | GcpSettings) -> str:
    """Write a cloud's settings as TOML, without those that have their default."""
    default = type(settings)()
    lines, tables = list[str](), list[str]()
    for name in (each.name for each in dataclasses.fields(settings)):
        value = getattr(settings, name)
        if value == getattr(default, name) or name in LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            tables += [f"[{name}]", *(f"{json.dumps(key)} = {json.dumps(found)}" for key, found in value.items())]
        else:
            lines.append(f"{name} = {json.dumps(value)}")
    return "".join(f"{line}\n" for line in (*lines, *tables))
