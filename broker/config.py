"""Paths and settings. Precedence: flag > environment > `config.toml` > default; the CLI passes flags in.

BROKER_HOME names the state folder (default `~/.broker`, mode 0700); everything broker remembers lies below it.
BROKER_CHECKPOINTS, or `checkpoints` in its `config.toml`, names the bucket for tasks that say none themselves;
`unattended` there says how long managed jobs go on while this machine is away.
"""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

from broker.errors import UsageError
from broker.nouns import noun

SETTINGS = "config.toml"
KNOWN = ("checkpoints", "unattended")
# Where programs can keep checkpoints: buckets that the bundled trainers write to, and folders that every node sees.
CHECKPOINT_URL = r"(?:(?:s3|gs|az)://[^/\s]\S*|file:///\S*|/\S*)"


@noun
class Config:
    """Where things are for one installation. `owner` tags every cloud resource this installation makes."""

    home: Path
    owner: str

    @property
    def database(self) -> Path:
        return self.home / "state.db"

    @property
    def local_cloud(self) -> Path:
        return self.home / "local"

    @property
    def checkpoints(self) -> Path:
        return self.home / "checkpoints"

    @property
    def keys(self) -> Path:
        return self.home / "keys"

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def daemon_log(self) -> Path:
        return self.logs / "daemon.log"

    @property
    def daemon_lock(self) -> Path:
        return self.home / "daemon.lock"


def find_home(home: Path | None = None) -> Path:
    """Where the state folder is, or would be made."""
    folder = home or Path(os.environ.get("BROKER_HOME") or Path.home() / ".broker")
    return folder.expanduser().resolve()


def load_config(home: Path | None = None) -> Config:
    """Find or make the state folder; the owner id is drawn once and kept beside the state."""
    folder = find_home(home)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    identity = folder / "owner"
    if not identity.exists():
        _draw_owner(identity)
    return Config(home=folder, owner=identity.read_text().strip())


def find_checkpoint_url(config: Config) -> str | None:
    """Where checkpoints go by default. Raises UsageError that names the setting which says no such place."""
    text: object = os.environ.get("BROKER_CHECKPOINTS")
    source = "BROKER_CHECKPOINTS"
    if not text:
        source = f"{config.home / SETTINGS}: `checkpoints`"
        text = _read_settings(config.home / SETTINGS).get("checkpoints")
    if text is None:
        return None
    if not re.fullmatch(CHECKPOINT_URL, str(text)):
        raise UsageError(f"{source} is `{text}`", hints=("It is a bucket, as `s3://BUCKET/FOLDER`, or a folder.",))
    return str(text)


def find_unattended(config: Config) -> object:
    """`unattended` as it is written in `config.toml`; None where it is not. Raises UsageError for a broken file."""
    return _read_settings(config.home / SETTINGS).get("unattended")


def _read_settings(path: Path) -> dict[str, object]:
    import tomllib  # 5 ms that most commands do not need

    try:
        found: dict[str, object] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error
    unknown = sorted(set(found) - set(KNOWN))
    if unknown:
        raise UsageError(f"{path}: there is no `{unknown[0]}`", hints=(f"known settings: {', '.join(KNOWN)}",))
    return found


def _draw_owner(identity: Path) -> None:
    """Appears whole or not at all: of two first commands at once, both read the same one."""
    aside = identity.with_name(f".owner.{uuid.uuid4().hex}")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(uuid.uuid4().hex[:12])
    try:
        os.link(aside, identity)
    except FileExistsError:
        pass
    finally:
        aside.unlink()


def read_aws_environment() -> dict[str, str]:
    """The variables that steer AWS's tools."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def read_azure_environment() -> dict[str, str]:
    """The variables that steer Azure's tools."""
    return {name: value for name, value in os.environ.items() if name.startswith("AZURE_")}


def read_r2_environment() -> dict[str, str]:
    """The variables that name a login for Cloudflare's R2."""
    return {name: value for name, value in os.environ.items() if name.startswith("R2_")}
