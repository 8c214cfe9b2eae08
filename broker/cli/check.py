"""`broker check`: which clouds can be used, and how to enable the others."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from broker.cli.context import Context
from broker.cli.render import print_json, print_line, print_table
from broker.clouds import CHECKS, CLOUDS
from broker.clouds.findings import CanGlance
from broker.errors import CloudError, UsageError

if TYPE_CHECKING:
    from broker.clouds.findings import Finding, Inspector

EXTRAS = {"aws": "boto3", "gcp": "google.cloud"}  # cloud -> what its adapter imports
LOGIN_HINTS = {"aws": "log in with `aws configure`", "gcp": "log in with `gcloud auth application-default login`"}


def check(
    cloud: Annotated[str | None, typer.Argument(help="Look at this cloud only, and closely.")] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="CLOUD", help="Print the permissions that a cloud's login needs, as a file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As data.")] = False,
) -> None:
    """Say which clouds can be used and how to enable the others."""
    context = Context()
    if policy is not None:
        print_line(_find_inspector(policy).write_policy(context.config).rstrip("\n"))
    elif cloud is not None:
        _show_closely(context, cloud, as_json=as_json)
    else:
        _show_all(context, as_json=as_json)


def _show_all(context: Context, *, as_json: bool) -> None:
    rows = [("local", True, "this machine, pretend prices")]
    for name in context.book.count_offers():
        if name in CHECKS and (name in context.clouds or _can_glance(name)):
            rows.append((name, *_sum_up(name, context)))
        elif name not in CLOUDS or name not in context.clouds:
            rows.append((name, False, _explain(name)))
    listed = {name for name, _, _ in rows}
    unlisted = [(name, *_sum_up(name, context)) for name in CHECKS if name not in listed and _can_glance(name)]
    rows += [row for row in unlisted if row[1]]
    if as_json:
        print_json([{"cloud": name, "can_launch": can, "note": note} for name, can, note in rows])
        return
    print_table(["CLOUD", "LAUNCH", "NOTE"], [[name, "yes" if can else "no", note] for name, can, note in rows])
    print_line("Every cloud listed can be planned on: `broker plan`, `broker launch --dryrun`")


def _sum_up(name: str, context: Context) -> tuple[bool, str]:
    try:
        findings = _inspect(name, context, is_glance=True)
    except CloudError as error:
        return False, error.message
    wrong = next((each for each in findings if each.is_needed and not each.is_ok), None)
    if wrong is None:
        return True, f"{findings[0].note}; more: `broker check {name}`"
    return False, f"{wrong.name}: {wrong.note}; more: `broker check {name}`"


def _show_closely(context: Context, name: str, *, as_json: bool) -> None:
    findings = _inspect(name, context)
    if as_json:
        keys = ("name", "is_ok", "note", "command", "is_needed")
        print_json([{key: getattr(each, key) for key in keys} for each in findings])
        return
    for each in findings:
        word = "ok" if each.is_ok else "wrong" if each.is_needed else "none"
        print_line(f"{word:5}  {each.name}: {each.note}")
        if each.command:
            print_line(f"       mend: {each.command}")


def _inspect(name: str, context: Context, *, is_glance: bool = False) -> Sequence[Finding]:
    import asyncio

    inspector = _find_inspector(name)
    look = inspector.glance if is_glance and isinstance(inspector, CanGlance) else inspector.inspect
    return asyncio.run(look(context.config, clock=context.clock))


def _find_inspector(name: str) -> Inspector:
    if name not in CHECKS:
        raise UsageError(f"there is nothing to check at `{name}`", hints=(f"There is {', '.join(sorted(CHECKS))}.",))
    if name in EXTRAS and not _is_installed(EXTRAS[name]):
        raise UsageError(f"`{name}` needs its library", hints=(f"Install `intercloud-broker[{name}]`.",))
    module, _, maker = CHECKS[name].partition(":")
    found = importlib.import_module(module)
    inspector: Inspector = getattr(found, maker)(name) if maker else found
    return inspector


def _can_glance(name: str) -> bool:
    return ":" in CHECKS[name] and isinstance(_find_inspector(name), CanGlance)


def _explain(name: str) -> str:
    """Why nothing can be launched there."""
    if name not in CLOUDS:
        return "no adapter yet"
    if name in EXTRAS and not _is_installed(EXTRAS[name]):
        return f"install `intercloud-broker[{name}]`"
    return LOGIN_HINTS.get(name, "no login found")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
