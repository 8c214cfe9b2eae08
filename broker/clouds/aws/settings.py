"""User settings for AWS, in `aws.toml` in the state folder; every line is optional. See docs/AWS.md."""

from __future__ import annotations

import dataclasses
import ipaddress
import tomllib
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from broker.errors import UsageError
from broker.frozen import frozen

FILE = "aws.toml"
KINDS = {"list": "a list", "dict": "a table", "bool": "`true` or `false`", "str": "a string"}  # TOML's terms
ADDRESS_URL = "https://checkip.amazonaws.com"  # Amazon's own; responds with the caller's address as one line


@frozen
class Settings:
    """`ssh_from`: address blocks that may log in; empty: this machine's current address."""

    regions: tuple[str, ...] = ()  # empty: all that are enabled in the account
    ssh_from: tuple[str, ...] = ()
    vpcs: Mapping[str, str] = field(default_factory=dict)  # region -> VPC; the default VPC elsewhere
    images: Mapping[str, str] = field(default_factory=dict)  # region -> image; the public image elsewhere
    user: str = "ubuntu"  # the images' login user
    instance_profile: str | None = None
    bucket_role: str | None = None  # ARN of a role that broker assumes for nodes' access to buckets
    uses_private_addresses: bool = False  # nodes get no public address: broker runs inside the VPC, or can reach it
    address_url: str = ADDRESS_URL


def load_settings(home: Path) -> Settings:
    """Load the settings. Raises UsageError that names file and key."""
    path = home / FILE
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Settings()
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}") from error
    known = {each.name: each for each in dataclasses.fields(Settings)}
    for name, value in found.items():
        if name not in known:
            raise UsageError(
                f"{path}: unknown setting `{name}`", hints=(f"known settings: {', '.join(sorted(known))}",)
            )
        _check(path, name, value)
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    return Settings(**values)


def _check(path: Path, name: str, value: Any) -> None:
    kinds = {"regions": "list", "ssh_from": "list", "vpcs": "dict", "images": "dict", "uses_private_addresses": "bool"}
    kind = kinds.get(name, "str")
    if type(value).__name__ != kind:
        raise UsageError(f"{path}: `{name}` must be {KINDS[kind]}")
    inner = value.values() if kind == "dict" else value if kind == "list" else ()
    if not all(isinstance(each, str) for each in inner):
        raise UsageError(f"{path}: `{name}` must contain strings")
    if name == "ssh_from":
        for block in value:
            try:
                ipaddress.ip_network(block)
            except ValueError as error:
                hints = ('Write `ssh_from = ["203.0.113.7/32"]`.',)
                raise UsageError(f"{path}: `ssh_from`: {error}", hints=hints) from error
