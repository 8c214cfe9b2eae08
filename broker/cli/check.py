"""`broker check`: which clouds can be used, and how to enable the others."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated

import typer

from broker.cli.context import Context
from broker.cli.render import print_json, print_line, print_table
from broker.clouds import CLOUDS


def check(as_json: Annotated[bool, typer.Option("--json", help="As data.")] = False) -> None:
    """Say which clouds can be used and how to enable the others."""
    rows = [("local", True, "this machine, pretend prices")]
    rows += [(name, False, _explain(name)) for name in Context().book.count_offers() if name not in CLOUDS]
    if as_json:
        print_json([{"cloud": name, "can_launch": can, "note": note} for name, can, note in rows])
        return
    print_table(["CLOUD", "LAUNCH", "NOTE"], [[name, "yes" if can else "no", note] for name, can, note in rows])
    print_line("Every cloud listed can be planned on: `broker plan`, `broker launch --dryrun`")


def _explain(name: str) -> str:
    """What is there already of what a launch will need; the adapter itself is still to come."""
    login = {
        "aws": _find_login("boto3", "aws", [".aws/credentials", ".aws/config"], "AWS_ACCESS_KEY_ID"),
        "gcp": _find_login(
            "google.cloud", "gcp", [".config/gcloud/application_default_credentials.json"],
            "GOOGLE_APPLICATION_CREDENTIALS",
        ),
    }.get(name)  # fmt: skip
    return f"no adapter yet{f'; {login}' if login else ''}"


def _find_login(module: str, extra: str, files: list[str], variable: str) -> str:
    if not _is_installed(module):
        return f"install `intercloud-broker[{extra}]`"
    if os.getenv(variable) or any((Path.home() / each).exists() for each in files):
        return "SDK and login are there"
    return f"log in, or set {variable}"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
