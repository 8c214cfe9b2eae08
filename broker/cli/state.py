"""`broker state`: inspect, back up, restore and reset the state file, which holds all of broker's state."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from broker.app.ownership import find_owner, hold_daemon, restore_owner
from broker.cli import options
from broker.cli.context import make_context
from broker.cli.render import print_json, print_line
from broker.config import Config, find_home, find_state_url
from broker.errors import DROPPABLE_TABLES, StateError, UsageError
from broker.formatting import format_count

app = typer.Typer(
    help="Inspect, back up, restore or reset the state file.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
CopyName = Annotated[
    str | None, typer.Argument(metavar="COPY", help="Backup: a name in `backups/`, or a path (default: the newest).")
]
HINTS_MAX = 5  # of `check`, one for each damaged row
IsOwner = Annotated[bool, typer.Option("--owner", help="Rewrite only the lost or damaged `owner` file.")]


@app.callback()
def root() -> None:
    """Inspect, back up, restore or reset the state file."""


@app.command()
def info(as_json: options.AsJson = False) -> None:
    """Show the state file, its condition and its backups."""
    from broker.state.restoring import describe_copy, examine

    if find_state_url(find_home()) is not None:
        _show_server(as_json=as_json)
        return
    found = examine(_find_database())
    if as_json:
        copies = [
            {"path": str(copy.path), "time_s": copy.time_s, "size_bytes": copy.size_bytes} for copy in found.copies
        ]
        print_json(
            {"path": str(found.path), "size_bytes": found.size_bytes, "schema": found.schema, "lineage": found.lineage,
             "installation": found.installation, "is_whole": not found.problems, "problems": list(found.problems),
             "copies": copies}
        )  # fmt: skip
        return
    print_line(f"file          {found.path}")
    if found.size_bytes is not None:
        print_line(f"size          {found.size_bytes / 1024:,.0f} KiB, schema {found.schema or '-'}")
    print_line(f"installation  {found.installation or '-'}")
    print_line(f"lineage       {found.lineage or '-'}")
    print_line(f"condition     {found.problems[0] if found.problems else 'intact'}")
    for problem in found.problems[1:]:
        print_line(f"              {problem}")
    for index, copy in enumerate(found.copies):
        print_line(f"{'backups' if index == 0 else '':13s} {describe_copy(copy)}")
    if not found.copies:
        print_line("backups       none yet; the daemon writes one per day; write one now with `broker state backup`")


@app.command()
def backup() -> None:
    """Back up the state file."""
    print_line(f"backed up to {make_context().store.copy()}")


@app.command()
def restore(copy: CopyName = None, owner: IsOwner = False, yes: options.Yes = False) -> None:
    """Replace the state file with a backup.

    The current file is kept under another name.
    """
    from broker.clock import SystemClock
    from broker.state.restoring import find_copy
    from broker.state.restoring import restore as put_back

    if owner:
        found = restore_owner(Config(home=find_home(), owner="").database)
        print_line(f"restored the ID {found.owner} in {found.path}")
        return
    database = _find_database()
    chosen = find_copy(database, copy, now_s=SystemClock().now_s())
    options.confirm(f"Replace {database} with {chosen.name}?", yes=yes)
    with hold_daemon(database):
        aside = put_back(database, chosen, clock=SystemClock(), owner=find_owner(database))
    print_line(f"restored from {chosen}")
    if aside is not None:
        print_line(f"the previous file is now {aside}")
    print_line("adopt running nodes that the backup does not list with `broker gc`, then see `broker status`")


@app.command()
def reset(yes: options.Yes = False) -> None:
    """Start with an empty state file.

    The current file is kept under another name.
    """
    from broker.app.moving import explain_moved, forget_moved, read_moved
    from broker.clock import SystemClock
    from broker.hosting.record import HostedRecord
    from broker.state.restoring import reset as start_empty

    database = _find_database()
    moved = read_moved(database.parent)
    if moved is not None and HostedRecord(database.parent).read() is not None:
        raise explain_moved(moved)
    owner = find_owner(database)
    if owner is None:
        raise StateError(
            "the ID of this installation is unknown",
            hints=("recover it from a backup with `broker state restore --owner`",),
        )
    options.confirm(f"Delete all jobs, clusters and costs in {database}?", yes=yes)
    with hold_daemon(database):
        aside = start_empty(database, clock=SystemClock(), owner=owner)
        forget_moved(database.parent)  # the server that drove its jobs was removed
    print_line(f"{database} is now empty")
    if aside is not None:
        print_line(f"the previous file is now {aside}")
    print_line("adopt running nodes by their tags with `broker gc`, then see `broker status`")


@app.command()
def drop(
    table: Annotated[
        str,
        typer.Argument(metavar="TABLE", help=f"Table, as named in the error: {', '.join(DROPPABLE_TABLES)}."),
    ],
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key, as named in the error.")],
    yes: options.Yes = False,
) -> None:
    """Delete one damaged row.

    The next `broker gc` terminates the nodes of a dropped cluster.
    """
    from broker.state.restoring import drop_row

    context = make_context()
    options.confirm(f"Delete row {key} of {table}?", yes=yes)
    if not drop_row(context.store, table, key):
        raise UsageError(
            f"unknown row `{key}` in `{table}`", hints=["the error that reports a damaged row names its table and key"]
        )
    print_line(f"deleted row `{key}` of `{table}`")


@app.command()
def export(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="New file, in JSON lines.")],
) -> None:
    """Export the whole state to a file, to move it to another database.

    Secrets in it are encrypted with the key in `secret.key`. Stop the daemon before you move live jobs.
    """
    from broker.state.transfer import export_store

    if target.exists():
        raise UsageError(f"{target} already exists", hints=("name a new file",))
    moved = export_store(make_context().store, target)
    print_line(f"exported {moved.total:,} rows to {target}")


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="File that `broker state export` wrote.")],
) -> None:
    """Load an exported file into an empty state.

    Before anything starts, the running nodes are compared with the records, as after `broker state restore`.
    """
    from broker.state.transfer import import_store

    moved = import_store(make_context().store, source)
    print_line(f"imported {moved.total:,} rows from {source}")
    print_line("adopt running nodes that the file does not list with `broker gc`, then see `broker status`")


@app.command()
def check() -> None:
    """Check every row of the state for damage and dangling references."""
    from broker.state.transfer import check_store

    hints: dict[str, None] = {}  # in order, each once
    problems = check_store(make_context().store, on_damage=lambda error: hints.update(dict.fromkeys(error.hints)))
    for problem in problems:
        print_line(problem)
    if problems:
        raise StateError(f"the state has {format_count(len(problems), 'problem')}", hints=list(hints)[:HINTS_MAX])
    print_line("the state is intact")


def _show_server(*, as_json: bool) -> None:
    from broker.state.schema import MIGRATIONS

    store = make_context().store
    found = {
        "url": str(store),
        "schema": len(MIGRATIONS),
        "lineage": store.meta.lineage,
        "installation": store.meta.get("installation"),
        "controllers": store.claims.measure_load().controller_count,
    }
    if as_json:
        print_json(found)
        return
    print_line(f"database      {found['url']}, schema {found['schema']}")
    print_line(f"installation  {found['installation'] or '-'}")
    print_line(f"lineage       {found['lineage']}")
    print_line(f"controllers   {found['controllers']}")


def _find_database() -> Path:
    """Find the file without opening it: these commands must work even if the file is damaged."""
    if find_state_url(find_home()) is not None:
        raise UsageError(
            "this state is in PostgreSQL, not in a file",
            hints=("back it up and restore it with `pg_dump` and `pg_restore`, or `broker state export` and `import`",),
        )
    return Config(home=find_home(), owner="").database
