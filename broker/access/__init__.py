"""Bucket access for nodes: the buckets of a task, the granters that serve them, and the files that nodes receive.

See docs/BUCKET_ACCESS.md.
"""

from __future__ import annotations

import importlib

from broker.access.base import MakeGranter

# scheme of the bucket -> "module:maker"; a maker is `broker.access.base.MakeGranter`
GRANTERS: dict[str, str] = {
    "s3": "broker.access.s3:make_granter",
    "gs": "broker.access.gcs:make_granter",
    "az": "broker.access.azure:make_granter",
    "r2": "broker.access.r2:make_granter",
}


def find_granter(scheme: str) -> MakeGranter:
    """Return the function that makes the granter of a URL scheme."""
    module, _, maker = GRANTERS[scheme].partition(":")
    make: MakeGranter = getattr(importlib.import_module(module), maker)
    return make
