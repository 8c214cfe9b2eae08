"""Environment variables of other tools, and the environments of the programs that broker starts on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping

from broker.config import NOTIFY_PREFIX


def make_git_environment() -> dict[str, str]:
    """Return the environment for git: it asks for nothing, and its messages are in English."""
    silent = {
        "GIT_TERMINAL_PROMPT": "0",
        "GCM_INTERACTIVE": "never",  # Git Credential Manager opens a window
        "SSH_ASKPASS": "",  # desktops set it to a program that opens a window, which git uses for https as well
        "SSH_ASKPASS_REQUIRE": "never",
    }
    return {"GIT_ASKPASS": "", **os.environ, **silent, "LC_ALL": "C"}


def make_callback_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job's `event_callback`: this process's without broker's own secrets."""
    own = {
        name: value for name, value in os.environ.items()
        if name != "BROKER_SECRET_KEY" and not name.startswith(NOTIFY_PREFIX)
    }  # fmt: skip
    return {**own, **variables}


def read_aws_environment() -> dict[str, str]:
    """Return the variables that configure AWS's tools."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def read_azure_environment() -> dict[str, str]:
    """Return the variables that configure Azure's tools."""
    return {name: value for name, value in os.environ.items() if name.startswith("AZURE_")}


def read_r2_environment() -> dict[str, str]:
    """Return the variables that contain a login for Cloudflare's R2."""
    return {name: value for name, value in os.environ.items() if name.startswith("R2_")}


def read_mlflow_variables() -> dict[str, str]:
    """Return the variables of this process by which MLflow's clients log in."""
    names = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    return {name: os.environ[name] for name in names if name in os.environ}


def read_otlp_headers() -> str:
    """Return OpenTelemetry's variable for the headers of an export; empty if it is not set."""
    return os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")
