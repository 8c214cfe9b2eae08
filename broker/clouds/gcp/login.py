"""Google credentials and project, judged from environment and files; imports nothing from Google and makes no calls."""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from broker.clouds.gcp.settings import Settings
from broker.frozen import frozen

ENDPOINT = "https://compute.googleapis.com"
RESOURCE_MANAGER = "https://cloudresourcemanager.googleapis.com"
PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")  # names Google on its machines


@frozen
class Login:
    """A login.

    `endpoint` is set if a server other than Google responds: it is called without credentials. `source` describes in
    words where the credentials come from; `project` is empty if none is configured.
    """

    project: str
    source: str
    endpoint: str | None = None
    settings: Settings = Settings()

    @property
    def compute_url(self) -> str:
        """URL of Compute Engine, or of the fake that the tests name."""
        return self.endpoint or ENDPOINT

    @property
    def resource_manager_url(self) -> str:
        """URL of the Resource Manager, or of the fake that the tests name."""
        return self.endpoint or RESOURCE_MANAGER


def is_sdk_installed() -> bool:
    """Return whether Google's Compute Engine library is installed, without importing it."""
    try:
        return importlib.util.find_spec("google.cloud.compute_v1") is not None
    except ModuleNotFoundError:
        return False


def find_login(settings: Settings) -> Login | None:
    """Return the login; None if no credentials are found."""
    endpoint = os.getenv("BROKER_GCP_ENDPOINT")
    source, content = ("BROKER_GCP_ENDPOINT", {}) if endpoint else _find_credentials()
    if not source:
        return None
    return Login(
        project=settings.project or _find_project(content),
        source=source,
        endpoint=endpoint,
        settings=settings,
    )


def _find_credentials() -> tuple[str, dict[str, Any]]:
    """Search like google.auth.default: the variable, gcloud's file, this machine's service account."""
    named = os.getenv("GOOGLE_APPLICATION_CREDENTIALS")
    if named:
        path = Path(named).expanduser()
        return (f"GOOGLE_APPLICATION_CREDENTIALS={named}", _read_json(path)) if path.is_file() else ("", {})
    path = gcloud_folder() / "application_default_credentials.json"
    if path.is_file():
        return str(path), _read_json(path)
    if os.getenv("NO_GCE_CHECK") == "true":  # google.auth does not search there either
        return "", {}
    try:
        is_google = PRODUCT_NAME.read_text().strip().startswith("Google")
    except OSError:
        is_google = False
    return ("this machine's service account" if is_google else ""), {}


def gcloud_folder() -> Path:
    """Return the folder of gcloud's configuration."""
    return Path(os.getenv("CLOUDSDK_CONFIG") or Path.home() / ".config" / "gcloud")


def _find_project(credentials: dict[str, Any]) -> str:
    named = os.getenv("GOOGLE_CLOUD_PROJECT") or os.getenv("CLOUDSDK_CORE_PROJECT")
    own, quota = credentials.get("project_id"), credentials.get("quota_project_id")
    return str(named or own or _read_gcloud_project() or quota or "")


def _read_gcloud_project() -> str:
    """Read the project of gcloud's active configuration."""
    folder = gcloud_folder()
    try:
        active = (folder / "active_config").read_text().strip()
    except OSError:
        active = "default"
    parser = configparser.ConfigParser()
    try:
        parser.read(folder / "configurations" / f"config_{active}")
    except configparser.Error:
        return ""
    return parser.get("core", "project", fallback="")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
