"""S3 credentials that obstore does not find by itself: access granted by broker, and AWS's configuration files."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

AGE_S_MAX = 600.0  # time between reads of the file, which broker replaces while a program runs
FILES = ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")


class GrantedCredentials:
    """A session that broker keeps renewed in a file; obstore calls this again when the last answer has expired."""

    def __init__(self, path: Path) -> None:
        """Read from `path`, a file in the format of AWS's `credential_process`."""
        self._path = path

    def __call__(self) -> dict[str, Any]:
        """Return the credentials in the file, which is replaced atomically."""
        login = json.loads(self._path.read_text(encoding="utf-8"))
        again = datetime.now(timezone.utc) + timedelta(seconds=AGE_S_MAX)  # nodes may have Python 3.9
        end = str(login.get("Expiration") or "9999-01-01T00:00:00+00:00").replace("Z", "+00:00")
        return {
            "access_key_id": login["AccessKeyId"],
            "secret_access_key": login["SecretAccessKey"],
            "token": login.get("SessionToken"),
            "expires_at": min(again, datetime.fromisoformat(end)),
        }


def find_s3_provider() -> Callable[[], Any] | None:
    """Return a provider, or None if obstore finds credentials itself: in variables, or by the machine's role."""
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return None
    granted = Path(os.environ.get("BROKER_ACCESS_DIR") or "/nonexistent") / "aws.json"
    if granted.exists():
        return GrantedCredentials(granted)
    if (Path.home() / ".aws").is_dir() or any(name in os.environ for name in FILES):
        with contextlib.suppress(ImportError):
            import boto3
            from obstore.auth.boto3 import Boto3CredentialProvider

            session = boto3.Session()
            if session.get_credentials() is not None:
                provider: Callable[[], Any] = Boto3CredentialProvider(session)
                return provider
    return None
