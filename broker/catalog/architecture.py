"""Derive a machine's processor architecture from its name: price lists lack it, and programs are built for one."""

from __future__ import annotations

import re

USUAL = "x86_64"
# Each cloud names its Arm machines by a rule; a test checks it against every machine of the shipped book.
ARM_NAMES = {
    "aws": re.compile(r"a1\.|[a-z]+\d+g[a-z]*\.|im4gn|is4gen|p6e-gb|u-p6e-gb"),
    "azure": re.compile(r"Standard_(?:[A-Z]+\d+(?:-\d+)?[a-z]*p[a-z]*(?:_|$)|ND.*_GB\d)"),
    "gcp": re.compile(r"(?:t2a|c4a|n4a|a4x)-"),
    "oci": re.compile(r"(?:VM|BM)\.(?:Standard\.A\d|GPU\.GB\d)"),
    "lambda": re.compile(r".*gh200"),
}


def guess_architecture(cloud: str, instance_type: str) -> str:
    """Return `arm64` or `x86_64`."""
    rule = ARM_NAMES.get(cloud)
    return "arm64" if rule and rule.match(instance_type) else USUAL
