"""`broker state`: the file in which broker remembers everything, its copies, and what to do when it is lost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from broker.cli import options
from broker.cli.context import Context
from broker.cli.render import print_json, print_line
from broker.config import Config, find_home, read_guarded_owner, read_owner, write_owner
from broker.errors import StateError, UsageError

app = typer.Typer(
    help="The state file: its condition, copies, restore and reset",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
CopyName = Annotated[str | None, typer.Argument(help="Name in `backups/`, or a path; the newest without it.")]
IsOwner = Annotated[bool, typer.Option("--owner", help="Write the lost or damaged file `owner` again, and no more.")]


@app.callback()
def root() -> None:
    """The state file: its condition, copies, restore and reset."""


@app.command()
def info(as_json: options.AsJson = False) -> None:
    """Show the state file, whether it is whole, and its copies."""
    from broker.state.restoring import describe_copy, examine

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
    print_line(f"condition     {found.problems[0] if found.problems else 'whole'}")
    for problem in found.problems[1:]:
        print_line(f"              {problem}")
    for index, copy in enumerate(found.copies):
        print_line(f"{'copies' if index == 0 else '':13s} {describe_copy(copy)}")
    if not found.copies:
        print_line("copies        none yet; the daemon writes one a day, `broker state backup` one now")


@app.command()
def backup() -> None:
    """Write a copy of the state file now."""
    print_line(f"copied to {Context().store.copy()}")


@app.command()
def restore(copy: CopyName = None, owner: IsOwner = False, yes: options.Yes = False) -> None:
    """Put a copy in the place of the state file; the present one is kept aside."""
    from broker.clock import SystemClock
    from broker.state.restoring import find_copy
    from broker.state.restoring import restore as put_back

    database = _find_database()
    if owner:
        _restore_owner(database)
        return
    chosen = find_copy(database, copy)
    _confirm(f"Put {chosen.name} in the place of {database}?", yes=yes)
    with _without_daemon(database):
        aside = put_back(database, chosen, clock=SystemClock(), owner=_read_owner(database))
    print_line(f"restored from {chosen}")
    if aside is not None:
        print_line(f"the file that was there is now {aside}")
    print_line("machines that run and are not in the copy are adopted by their tags: `broker gc`, then `broker status`")


@app.command()
def reset(yes: options.Yes = False) -> None:
    """Start with an empty state file; the present one is kept aside."""
    from broker.clock import SystemClock
    from broker.state.restoring import reset as start_empty

    database = _find_database()
    owner = _read_owner(database)
    if owner is None:
        raise StateError(
            "the id of this installation is not known",
            hints=("`broker state restore --owner` writes it where a copy knows it",),
        )
    _confirm(f"Forget all jobs, clusters and costs in {database}?", yes=yes)
    with _without_daemon(database):
        aside = start_empty(database, clock=SystemClock(), owner=owner)
    print_line(f"{database} is empty")
    if aside is not None:
        print_line(f"the file that was there is now {aside}")
    print_line("machines that still run are adopted by their tags: `broker gc`, then `broker status` shows them")


@app.command()
def drop(
    table: Annotated[str, typer.Argument(help="As an error names it: jobs, attempts, clusters, intents or nodes.")],
    key: Annotated[str, typer.Argument(help="As an error names it.")],
    yes: options.Yes = False,
) -> None:
    """Remove one damaged row; machines of a dropped cluster are ended by the next `broker gc`."""
    from broker.state.restoring import drop_row

    context = Context()
    _confirm(f"Remove row {key} of {table}?", yes=yes)
    if not drop_row(context.store, table, key):
        raise UsageError(f"there is no row `{key}` in `{table}`")
    print_line(f"row `{key}` of `{table}` is removed")


def _find_database() -> Path:
    """Found without opening anything: these commands work where nothing else does."""
    return Config(home=find_home(), owner="").database


def _read_owner(database: Path) -> str | None:
    """From the file, or else from what keeps it too."""
    from broker.state.restoring import examine

    try:
        owner = read_owner(database.parent / "owner")
    except OSError:
        owner = None
    return owner or read_guarded_owner(database.parent) or examine(database).installation


def _restore_owner(database: Path) -> None:
    from broker.state.restoring import examine

    found = examine(database)
    known = found.installation or read_guarded_owner(database.parent)
    for copy in found.copies:
        known = known or examine(copy.path).installation
    path = database.parent / "owner"
    if not known:
        raise StateError(
            "neither the state file nor a copy knows the id of this installation",
            hints=(f"The tag `broker-owner` of your machines has it: `echo ID > {path}`",),
        )
    try:
        write_owner(database.parent, known)
    except OSError as error:
        from broker.state.faults import explain_os_error

        raise explain_os_error(error, default=path) from error
    print_line(f"{path} says {known} again")


def _confirm(question: str, *, yes: bool) -> None:
    if not yes and sys.stdin.isatty():
        typer.confirm(question, abort=True)


@contextmanager
def _without_daemon(database: Path) -> Iterator[None]:
    """Raises StateError while a daemon lives; holds its lock, so that none starts."""
    from broker.jobs.daemon import hold_lock

    with hold_lock(Config(home=database.parent, owner="")) as is_held:
        if not is_held:
            raise StateError(
                "a daemon drives the jobs of this state folder",
                hints=(
                    "It leaves a minute after the last job has ended, or when it is sent SIGTERM; "
                    f"`fuser {database.parent / 'daemon.lock'}` shows its process",
                ),
            )
        yield
