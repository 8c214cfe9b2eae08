"""Paths and settings. Precedence: flag > environment > `config.toml` > default; the CLI passes flags in.

BROKER_HOME names the state folder (default `~/.broker`, mode 0700), which holds all of broker's state.
BROKER_CHECKPOINTS, or `checkpoints` in its `config.toml`, is the default checkpoint location; `unattended` sets how
long managed jobs continue while this machine is away; with `bucket_access = "own"` nodes get no grants to buckets.
`catalog.auto_update = false` ends the update of prices in the background; BROKER_OFFLINE and CI do so for one process.
BROKER_STATE, or `state`, is the URL of a PostgreSQL database that holds the state instead of a file in that folder;
BROKER_SECRET_KEY encrypts the secrets in it. `[notify]` says which notifications about jobs go where; variables whose
names begin with BROKER_NOTIFY_ contain its secrets.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from broker.errors import BrokerError, StateError, UsageError
from broker.frozen import frozen

if TYPE_CHECKING:
    from broker.user_files import UserFile

SETTINGS = "config.toml"
LOGIN = "login.json"  # the server that commands speak to
QUEUE_SETTINGS = ("max_live_jobs", "max_live_jobs_by_project", "preempt_after", "preempt_lower_priority")
SETTING_NAMES = (
    "admin_policy", "backup", "bucket_access", "catalog", "checkpoints", "keep_days", "log_format", *QUEUE_SETTINGS,
    "notify", "oidc", "state", "trusted_proxy", "unattended",
)  # fmt: skip
KEEP_DAYS = 90.0
NOTIFY_PREFIX = "BROKER_NOTIFY_"  # of variables that contain targets of notifications
NO_WORDS = ("", "0", "false", "no")
# Valid checkpoint locations: buckets that the bundled trainers can write to, and folders shared by all nodes.
OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # valid as a tag's value on every cloud
STATE_URL = r"postgres(?:ql)?://"
ADMIN_POLICY = r"(?:(?:[A-Za-z_]\w*)(?:\.(?!py:)[A-Za-z_]\w*)*|/\S*\.py):[A-Za-z_]\w*"
BACKUP_URL = r"(?:s3|gs)://[^/\s]\S*|file:///\S+"
CHECKPOINT_URL = r"(?:(?:s3|gs|az)://[^/\s]\S*|file:///\S*|/\S*)"

_KEPT: dict[Path, UserFile[Mapping[str, object]]] = {}  # see `keep_settings`


@frozen
class Config:
    """Paths of one installation. `owner` tags every cloud resource that this installation creates."""

    home: Path
    owner: str

    @property
    def database(self) -> Path:
        """The SQLite file of the state."""
        return self.home / "state.db"

    @property
    def local_cloud(self) -> Path:
        """The folder of the local cloud's nodes."""
        return self.home / "local"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints of jobs on the local cloud."""
        return self.home / "checkpoints"

    @property
    def keys(self) -> Path:
        """The SSH keys of gangs, mode 0700."""
        return self.home / "keys"

    @property
    def logs(self) -> Path:
        """The logs of jobs and of the daemon."""
        return self.home / "logs"

    @property
    def daemon_log(self) -> Path:
        """The daemon's log, rotated while it runs."""
        return self.logs / "daemon.log"

    @property
    def daemon_lock(self) -> Path:
        """The file that the running daemon holds locked."""
        return self.home / "daemon.lock"


def find_home(home: Path | None = None) -> Path:
    """Return the path of the state folder, whether or not it exists."""
    folder = home or Path(os.environ.get("BROKER_HOME") or Path.home() / ".broker")
    return folder.expanduser().resolve()


def is_state_folder(folder: Path, names: Collection[str]) -> bool:
    """Return whether this is a state folder, of this installation or of another one; `names` are its entries."""
    return "owner" in names and ("state.guard" in names or "state.db" in names or folder.resolve() == find_home())


def load_config(home: Path | None = None) -> Config:
    """Find or create the state folder; the owner id is generated once and stored in it.

    Raises StateError if the id is lost: a new one could not find the machines tagged with the old one.
    """
    folder = find_home(home)
    identity = folder / "owner"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not identity.exists() and not _is_used(folder):
            _draw_owner(identity)
        owner = read_owner(identity)
    except OSError as error:
        raise StateError(
            f"cannot use {error.filename or folder}: {error.strerror or error}",
            hints=("check the state folder and its disk, or set `BROKER_HOME` to another folder",),
        ) from error
    known = read_guarded_owner(folder)
    if owner is None or (known and known != owner):
        what = f"{owner}, but the state file belongs to {known}" if owner else "missing, empty or damaged"
        raise StateError(
            f"the ID of this installation in {identity} is {what}",
            details=("Nodes are found by this ID; with another one, running nodes would be lost.",),
            hints=("restore the ID from the state file: `broker state restore --owner`",),
        )
    return Config(home=folder, owner=owner)


def read_owner(identity: Path) -> str | None:
    """Return the owner id; None if the file is missing or contains none. Raises OSError."""
    try:
        text = identity.read_bytes().decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        return None
    return text if OWNER.fullmatch(text) else None


def read_guarded_owner(folder: Path) -> str | None:
    """Return the owner id in the guard of the state file; None if there is no readable one."""
    owner = _read_guard(folder).get("owner")
    return owner if isinstance(owner, str) and OWNER.fullmatch(owner) else None


def _read_guard(folder: Path) -> dict[str, object]:
    """Return the guard's content; empty if there is no readable one."""
    try:
        found = json.loads((folder / "state.guard").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_owner(folder: Path, owner: str) -> None:
    """Replace the file atomically. Raises OSError."""
    aside = _write_aside(folder / "owner", owner)
    try:
        aside.replace(folder / "owner")
    finally:
        aside.unlink(missing_ok=True)


def _is_used(folder: Path) -> bool:
    """Return whether a store with an owner existed here. The id is generated first, so a missing one was lost."""
    is_used = any((folder / name).exists() for name in ("state.db", "state.guard"))
    # a user's program may have created it without an owner
    is_used = is_used and _read_guard(folder).get("owner") != ""
    # checked again: a concurrent first command may have just generated it
    return is_used and not (folder / "owner").exists()


def keep_settings(home: Path) -> None:
    """Read `config.toml` now; from now on this process keeps its last valid content while the file is being edited.

    For processes that outlive a command. A file that is invalid now is reported by the first reader.
    """
    from broker.user_files import UserFile  # imports logging, which commands do not need

    path = home / SETTINGS
    _KEPT[path] = UserFile(path, partial(_parse_settings, path))
    with suppress(BrokerError):
        _KEPT[path].read()


def find_checkpoint_url(home: Path) -> str | None:
    """Return the default checkpoint location. Raises UsageError that names an invalid setting."""
    text: object = os.environ.get("BROKER_CHECKPOINTS")
    source = "BROKER_CHECKPOINTS"
    if not text:
        source, text = f"{home / SETTINGS}: `checkpoints`", _read_settings(home / SETTINGS).get("checkpoints")
    if text is None:
        return None
    if not re.fullmatch(CHECKPOINT_URL, str(text)):
        raise UsageError(f"{source} must be a bucket such as `s3://BUCKET/FOLDER`, or an absolute folder, not `{text}`")
    return str(text)


def find_state_url(home: Path) -> str | None:
    """Return the URL of the database that holds the state; None for the file in the state folder.

    Raises UsageError for another kind of database.
    """
    url: object = os.environ.get("BROKER_STATE")
    source = "BROKER_STATE"
    if not url:
        source, url = f"{home / SETTINGS}: `state`", _find_setting(home, "state")
    if url is None:
        return None
    if not isinstance(url, str) or not re.match(STATE_URL, url):
        raise UsageError(
            f"{source} must be a URL such as `postgresql://USER@HOST/DATABASE`",
            hints=("without it, the state is in a SQLite file of the state folder",),
        )
    return url


def find_login(home: Path | None = None) -> Path | None:
    """Return the file that `broker login` wrote; None while this user works on the state folder."""
    path = find_home(home) / LOGIN
    return path if path.exists() else None


def choose_state_url(url: str) -> None:
    """Use a database for the state in this process and those that it starts."""
    os.environ["BROKER_STATE"] = url


def read_secret_key() -> str | None:
    """Return the key that encrypts secrets in a shared database, as set in the environment."""
    return os.environ.get("BROKER_SECRET_KEY") or None


def find_backup_url(home: Path) -> str | None:
    """Return where a server copies the state: `backup` in `config.toml`. Raises UsageError for an invalid one."""
    url = _find_setting(home, "backup")
    if url is not None and not re.fullmatch(BACKUP_URL, str(url)):
        raise UsageError(
            f"{home / SETTINGS}: `backup` must be `s3://BUCKET/FOLDER`, `gs://...` or `file:///FOLDER`, not `{url}`"
        )
    return None if url is None else str(url)


def find_admin_policy(home: Path) -> str | None:
    """Return `admin_policy` of `config.toml`; None without it. Raises UsageError for an invalid one."""
    entry = _find_setting(home, "admin_policy")
    if entry is not None and not re.fullmatch(ADMIN_POLICY, str(entry)):
        raise UsageError(
            f"{home / SETTINGS}: `admin_policy` must be `package.module:function` or `/FOLDER/FILE.py:function`, "
            f"not `{entry}`"
        )
    return None if entry is None else str(entry)


def find_unattended(config: Config) -> object:
    """Return `unattended` as written in `config.toml`; None if it is not set. Raises UsageError for an invalid file."""
    return _read_settings(config.home / SETTINGS).get("unattended")


def find_notify(config: Config) -> object:
    """Return `[notify]` of `config.toml` as written; None without it. Raises UsageError for an invalid file."""
    return _read_settings(config.home / SETTINGS).get("notify")


def find_table(home: Path, name: str) -> object:
    """Return a table of `config.toml` as written; None without it. Raises UsageError for an invalid file."""
    return _read_settings(home / SETTINGS).get(name)


def read_notify_variable(name: str) -> str | None:
    """Return the value of a variable that a notification's target names; only these names can be read so."""
    assert name.startswith(NOTIFY_PREFIX)
    return os.environ.get(name)


def has_own_bucket_access(config: Config) -> bool:
    """Return whether nodes reach their buckets without a grant: `bucket_access = "own"` in `config.toml`."""
    value = _read_settings(config.home / SETTINGS).get("bucket_access", "granted")
    if value not in ("granted", "own"):
        raise UsageError(f'{config.home / SETTINGS}: `bucket_access` must be `"granted"` or `"own"`, not `{value}`')
    return value == "own"


def find_auto_update(home: Path | None = None) -> bool:
    """Return whether old prices may be updated in the background. Raises UsageError for an invalid setting."""
    if any(os.environ.get(name, "").lower() not in NO_WORDS for name in ("BROKER_OFFLINE", "CI")):
        return False
    table = _find_setting(find_home(home), "catalog") or {}
    value = table.get("auto_update", True) if isinstance(table, dict) and not set(table) - {"auto_update"} else None
    if not isinstance(value, bool):
        path = find_home(home) / SETTINGS
        raise UsageError(f"{path}: `[catalog]` may have `auto_update = true` or `auto_update = false`, not `{table}`")
    return value


def read_keep_days(config: Config) -> float:
    """Return for how many days an ended job is kept complete: `keep_days` in `config.toml`, 90 by default."""
    value = _read_settings(config.home / SETTINGS).get("keep_days", KEEP_DAYS)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 36500:
        raise UsageError(
            f"{config.home / SETTINGS}: `keep_days` must be a number of days from 1 to 36500, not `{value}`"
        )
    return float(value)


def find_queue_settings(config: Config) -> Mapping[str, object]:
    """Return the settings of the queue of jobs as written. Raises UsageError for an invalid file."""
    found = _read_settings(config.home / SETTINGS)
    return {name: found[name] for name in QUEUE_SETTINGS if name in found}


def has_json_logs(config: Config) -> bool:
    """Return whether the daemon logs one JSON object a line: `log_format = "json"` in `config.toml`."""
    value = _read_settings(config.home / SETTINGS).get("log_format", "text")
    if value not in ("text", "json"):
        raise UsageError(f'{config.home / SETTINGS}: `log_format` must be `"text"` or `"json"`, not `{value}`')
    return value == "json"


def _find_setting(home: Path, name: str) -> object:
    """Return one setting; None if the file lacks it. Most commands thus need no parser of TOML.

    An unreadable file counts as missing here: the first command that needs all settings reports it.
    """
    try:
        if home / SETTINGS not in _KEPT and name.encode() not in (home / SETTINGS).read_bytes():
            return None
    except OSError:
        return None
    return _read_settings(home / SETTINGS).get(name)


def _read_settings(path: Path) -> Mapping[str, object]:
    return _KEPT[path].read() if path in _KEPT else _parse_settings(path)


def _parse_settings(path: Path) -> Mapping[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: {error}") from error
    except OSError as error:
        raise StateError(
            f"cannot read {path}: {error.strerror or error}",
            hints=("make it a readable file, or remove it",),
        ) from error
    import tomllib  # 5 ms that commands without a file do not need

    try:
        found: dict[str, object] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}") from error
    unknown = sorted(set(found) - set(SETTING_NAMES))
    if unknown:
        raise UsageError(
            f"{path}: unknown setting `{unknown[0]}`", hints=(f"known settings: {', '.join(SETTING_NAMES)}",)
        )
    return found


def _draw_owner(identity: Path) -> None:
    """Generate the file atomically: of two concurrent first commands, both read the same id."""
    aside = _write_aside(identity, uuid.uuid4().hex[:12])
    try:
        os.link(aside, identity)
    except FileExistsError:
        pass
    finally:
        aside.unlink()


def _write_aside(path: Path, text: str) -> Path:
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return aside
