"""Find the optional library that the adapter of a cloud requires, without importing it."""

from __future__ import annotations

import importlib.util

from broker.clouds import CLOUDS

# cloud -> library that its adapter imports. Other packages of Google's bring `google.cloud`, so the module is named in
# full.
EXTRAS = {"aws": "boto3", "gcp": "google.cloud.compute_v1"}
SKY_MAKERS = "broker.clouds.sky.makers:"


def find_missing_extra(cloud: str) -> str | None:
    """Return the extra of this package that holds the cloud's missing library; None if it needs none or has it."""
    if cloud in EXTRAS:
        return None if _is_installed(EXTRAS[cloud]) else cloud
    if CLOUDS.get(cloud, "").startswith(SKY_MAKERS):
        from broker.clouds.sky.login import find_python

        return None if find_python() else "sky"
    return None


def write_install(extra: str) -> str:
    """Write the command that installs an extra of this package."""
    return f"pip install 'intercloud-broker[{extra}]'"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
