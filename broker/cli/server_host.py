"""`broker server up`, `upgrade`, `status` and `down`: a server of this installation on another machine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from broker.cli import options
from broker.cli.context import make_context
from broker.cli.launch import confirm_price
from broker.cli.plan_table import show_plan
from broker.cli.render import print_json, print_line, print_note
from broker.config import LOGIN, find_checkpoint_url, find_home, find_login
from broker.errors import UsageError
from broker.formatting import format_count, format_duration, to_plain
from broker.hosting.cloud_login import choose_login
from broker.hosting.finding import MachineFinder, check_infra
from broker.hosting.lifecycle import Hosting
from broker.hosting.record import FOLDER, HostedRecord, HostedServer, HostedStatus
from broker.runtime.package import EXTRAS
from broker.types import Plan

PORT = 8471

InfraOption = Annotated[
    str,
    typer.Option(
        "--infra",
        metavar="PLACE",
        help="Machine: local, ssh://[USER@]HOST, aws[/REGION] or gcp[/REGION].",
        show_default=False,
    ),
]
FolderOption = Annotated[
    str | None, typer.Option("--folder", metavar="PATH", help="Folder of the server on its machine.")
]
PortOption = Annotated[
    int, typer.Option("--port", metavar="PORT", min=1, max=65535, help="Port that the server listens on.")
]
BackupOption = Annotated[
    str | None,
    typer.Option("--backup", metavar="URL", help="Location for a backup every minute: s3://, gs:// or file://."),
]
RestoreOption = Annotated[
    str | None,
    typer.Option("--restore-from", metavar="URL", help="Restore the newest backup from this location."),
]
PythonOption = Annotated[
    str | None,
    typer.Option("--python", metavar="PATH", help="Python 3.11+ on that machine, with broker's packages."),
]
SshConfigOption = Annotated[
    Path | None,
    typer.Option("--ssh-config", metavar="FILE", help="OpenSSH configuration for ssh://HOST (default: yours)."),
]
RoleOption = Annotated[
    str | None,
    typer.Option(
        "--role",
        metavar="NAME",
        help="Instance profile or service account of the machine, or `none` (default on aws: broker makes a role).",
    ),
]
BucketOption = Annotated[
    list[str] | None,
    typer.Option("--bucket", metavar="BUCKET", help="S3 bucket that broker's role may use. Repeatable."),
]
LocalCloudOption = Annotated[
    bool, typer.Option("--local-cloud", help="Let tasks run on that machine, as the server's own user.")
]
LoginOption = Annotated[bool, typer.Option("--login", help="Log in to the server when it is up.")]


def up(
    infra: InfraOption,
    folder: FolderOption = None,
    port: PortOption = PORT,
    backup: BackupOption = None,
    restore_from: RestoreOption = None,
    python: PythonOption = None,
    ssh_config: SshConfigOption = None,
    role: RoleOption = None,
    bucket: BucketOption = None,
    local_cloud: LocalCloudOption = False,
    login: LoginOption = False,
    yes: options.Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Set up a server, or complete an interrupted setup.

    On a cloud, the cheapest on-demand machine with 2 vCPUs and 4 GB is started.
    """
    home = find_home()
    cluster = check_infra(infra)
    backup = backup or restore_from
    hosting = make_hosting(yes=yes)
    machine_login = choose_login(
        infra.partition("/")[0] if cluster else None, role=role, buckets=bucket or (), owner=hosting.owner,
        urls=(backup, find_checkpoint_url(home)),
    )  # fmt: skip
    wanted = HostedServer(
        infra=infra, port=port, status=HostedStatus.STARTING, cluster=cluster, login=machine_login, python=python,
        ssh_config=None if ssh_config is None else str(ssh_config.resolve()),
        folder=folder or (str(home / FOLDER / "server") if infra == "local" else "~/.broker-server"),
        options=("--local-cloud",) if local_cloud else (), restore_from=restore_from,
        config=f"backup = {json.dumps(backup)}\n" if backup else "",
        extras=(*EXTRAS, *((infra.split("/")[0],) if cluster else find_extras())),
    )  # fmt: skip
    server = hosting.bring_up(wanted)
    record = HostedRecord(home)
    if login:
        from broker.client.login import save_login

        save_login(home / LOGIN, hosting.make_login(server))
    _show_server(server, record, is_logged_in=login, as_json=as_json)


def _show_server(server: HostedServer, record: HostedRecord, *, is_logged_in: bool, as_json: bool) -> None:
    """Print the server's address and fingerprint, and how to log in."""
    if as_json:
        print_json({"url": server.url, "fingerprint": server.fingerprint, "token_file": str(record.token_path)})
        return
    print_line(f"Server: {server.url}")
    if server.fingerprint:
        print_line(f"Fingerprint: {server.fingerprint}")
    pinned = f" --fingerprint {server.fingerprint}" if server.fingerprint else ""
    if is_logged_in:
        print_line("Logged in as admin")
    else:
        print_line(f"Log in: broker login {server.url}{pinned} --token-file {record.token_path}")


def upgrade() -> None:
    """Upgrade the server to this machine's version of broker.

    Jobs continue on their nodes in the meantime.
    """
    server = make_hosting().upgrade()
    print_line(f"{server.url} runs broker {server.version}")


def status(as_json: options.AsJson = False) -> None:
    """Show the server's address, version, uptime and backup."""
    server, found = make_hosting().read_status()
    backup = found.get("backup") or {}
    age_s = found["now_s"] - backup["time_s"] if "time_s" in backup else None
    data = {
        "infra": server.infra, "status": server.status.value, "url": server.url, "fingerprint": server.fingerprint,
        "version": server.version, "is_running": bool(found.get("is_running")), "uptime_s": found.get("uptime_s"),
        "backup": backup.get("url"), "backup_age_s": age_s, "backup_error": backup.get("error"),
        "command": f"{server.folder}/broker",
    }  # fmt: skip
    if as_json:
        print_json(data)
        return
    uptime_s = found.get("uptime_s")
    print_line(f"address   {server.url or '-'}")
    print_line(f"machine   {server.infra}")
    print_line(f"command   {data['command']}")
    print_line(f"status    {_describe_status(server, is_running=data['is_running'] is True)}")
    print_line(f"version   {server.version or '-'}")
    print_line(f"uptime    {'-' if uptime_s is None else format_duration(uptime_s)}")
    print_line(f"backup    {_describe_backup(data)}")


def _describe_status(server: HostedServer, *, is_running: bool) -> str:
    if server.status is HostedStatus.STARTING:
        return "not complete; continue with `broker server up`"
    if server.status is HostedStatus.ENDING:
        return "ending; complete it with `broker server down`"
    return "running" if is_running else "not running; repair it with `broker server up`"


def _describe_backup(data: dict[str, object]) -> str:
    age_s = data["backup_age_s"]
    if not isinstance(age_s, float):
        return "none; set one up with `broker server up --backup URL`"
    failed = f"; the newest failed: {data['backup_error']}" if data["backup_error"] else ""
    return f"{data['backup']}, checked {format_duration(age_s)} ago{failed}"


def down(
    force: Annotated[
        bool, typer.Option("--force", help="Remove the server even if jobs, clusters or services run on it.")
    ] = False,
) -> None:
    """Stop the server and delete its machine.

    The exit code is 2, and nothing happens, while anything runs on it.
    """
    hosting = make_hosting()
    record = HostedRecord(find_home())
    server = record.read()
    counts = hosting.take_down(is_forced=force)
    path = find_login()
    if path is not None and server is not None:
        from broker.client.login import read_login

        if read_login(path).url == server.url:
            path.unlink(missing_ok=True)
            print_note("logged out of the server")
    print_line("The server has been removed")
    if counts is not None and counts.is_busy:
        print_note(
            f"{counts.describe()} lost their controller: machines terminate themselves when their unattended time is "
            "over, and are not recovered; history and costs are deleted with the server, except in its backups"
        )


def import_local(
    dryrun: Annotated[
        bool, typer.Option("--dryrun", "--dry-run", help="List what would move without moving it.")
    ] = False,
    yes: options.Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Move jobs, clusters and schedules to the server.

    Their programs are not restarted. Afterwards, nothing can be started from this state folder.
    Repeat the command after an interruption.
    """
    from broker.hosting.importing import list_work, move

    context = make_context()
    work = list_work(context)
    if as_json:
        print_json(to_plain(work))
    else:
        for noun in ("job", "cluster", "schedule", "service"):
            for name in getattr(work, f"{noun}s"):
                print_line(f"{noun} {name}")
    if dryrun:
        return
    options.confirm("Move this to the server?", yes=yes)
    hosting = make_hosting()
    server = move(context, hosting)
    record = HostedRecord(find_home())
    print_note(f"moved to {server.url}")
    path = find_login()
    if path is not None:
        from broker.client.login import read_login, save_login

        if read_login(path).url == server.url:  # its token was of the empty state that the move has replaced
            save_login(path, hosting.make_login(server))
            return
    pinned = f" --fingerprint {server.fingerprint}" if server.fingerprint else ""
    print_note(f"log in: broker login {server.url}{pinned} --token-file {record.token_path}")


def restore(
    source: Annotated[
        str,
        typer.Option(
            "--from", metavar="URL", help="Location of the backups: s3://, gs:// or file://.", show_default=False
        ),
    ],
    key_file: Annotated[
        Path | None,
        typer.Option("--key-file", metavar="FILE", help="The server's `secret.key` (default: the one in this folder)."),
    ] = None,
    yes: options.Yes = False,
) -> None:
    """Fill an empty state folder from a server's newest backup.

    From then on, the server that wrote the backup can no longer write. Start this one with `broker server start`.
    """
    from broker.app.backups import Backups
    from broker.clock import SystemClock

    home = find_home()
    options.confirm(f"Continue from {source} and stop the server that wrote it?", yes=yes)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if key_file is not None:
        _copy_key(key_file, home / "secret.key")
    restored = Backups(home, source, clock=SystemClock()).restore()
    settings = home / "config.toml"
    text = settings.read_text() if settings.exists() else ""
    if "backup" not in text:
        settings.write_text(f"backup = {json.dumps(source)}\n{text}")
    print_line(f"restored from {source} as epoch {restored.epoch}")
    if restored.missing:
        lacking = format_count(len(restored.missing), "upload")
        print_note(
            f"warning: the backup lacks {lacking} of live jobs; they continue on their machines, but fail if they need "
            "new ones"
        )
    print_note("start the server with `broker server start`; running machines are adopted within a few minutes")


def _copy_key(source: Path, target: Path) -> None:
    try:
        text = source.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {source}: {error}") from None
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


def make_hosting(*, yes: bool = True) -> Hosting:
    """Make the object that sets up this state folder's server, regardless of the server the user is logged in to."""
    context = make_context()

    def show(plans: Sequence[Plan]) -> None:
        show_plan(plans[0])

    finder = MachineFinder(context=context, show=show, confirm=lambda plans: confirm_price(plans, yes=yes))
    return Hosting(HostedRecord(find_home()), finder, owner=context.config.owner, note=print_note)


def find_extras() -> tuple[str, ...]:
    """Return the extras of the clouds whose libraries are installed here: the server needs the same."""
    from importlib.util import find_spec

    found = ["aws"] if find_spec("boto3") else []
    try:
        found += ["gcp"] if find_spec("google.cloud.compute") else []
    except ModuleNotFoundError:  # without any of Google's packages
        pass
    return tuple(found)


def check_group(name: str | None) -> None:
    """Refuse `broker server` commands on this machine's state while the user is logged in to a server."""
    from broker.cli.context import check_embedded

    if name not in HOSTING:
        check_embedded("server")


HOSTING = ("up", "upgrade", "status", "down", "restore", "import-local")
