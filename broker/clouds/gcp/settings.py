"""User settings for Google, in `gcp.toml` in the state folder; every line is optional. See docs/GCP.md."""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from broker.errors import UsageError
from broker.frozen import frozen

FILE = "gcp.toml"
IMAGE_KINDS = ("gpu", "cpu", "arm")


@frozen
class Settings:
    """`network`: a name, or the path of a network or subnetwork.

    `ssh_from`: address blocks that may log in; empty: this machine's current address.
    """

    project: str = ""  # empty: gcloud's project
    network: str = "default"
    ssh_from: tuple[str, ...] = ()
    images: Mapping[str, str] = field(default_factory=dict)  # "gpu", "cpu" or "arm" -> image; else Google's own
    uses_private_addresses: bool = False  # nodes get no public address: broker runs inside the network
    service_account: str = ""  # email of the account that programs on nodes use; empty: none


def load_settings(home: Path) -> Settings:
    """Load the settings. Raises UsageError that names file and key."""
    path = home / FILE
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Settings()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error
    kinds: dict[str, type] = {
        "project": str, "network": str, "ssh_from": list, "images": dict, "uses_private_addresses": bool,
        "service_account": str,
    }  # fmt: skip
    for name, value in values.items():
        if name not in kinds:
            raise UsageError(
                f"{path}: unknown setting `{name}`", hints=(f"known settings: {', '.join(sorted(kinds))}",)
            )
        if not isinstance(value, kinds[name]):
            raise UsageError(f"{path}: `{name}` must be a {kinds[name].__name__}")
    _check_blocks(path, values.get("ssh_from", []))
    _check_images(path, values.get("images", {}))
    return Settings(**{**values, "ssh_from": tuple(values.get("ssh_from", ()))})


def _check_blocks(path: Path, blocks: list[Any]) -> None:
    for block in blocks:
        try:
            ipaddress.IPv4Network(block)
        except ValueError as error:
            hint = 'Write `ssh_from = ["203.0.113.7/32"]`.'
            raise UsageError(f"{path}: `ssh_from`: {error}", hints=(hint,)) from error


def _check_images(path: Path, images: Mapping[str, Any]) -> None:
    for kind, image in images.items():
        if kind not in IMAGE_KINDS or not isinstance(image, str) or not image.startswith("projects/"):
            hint = '`gpu = "projects/PROJECT/global/images/IMAGE"`; keys: gpu, cpu, arm'
            raise UsageError(f"{path}: invalid image in `images.{kind}`", hints=(hint,))
