"""`broker serve keys`: create, list and revoke the API keys of a service."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from broker.app.service_checks import check_keys_available
from broker.app.services import find_service
from broker.cli import options
from broker.cli.context import check_embedded, make_context
from broker.cli.render import format_table, print_json, print_line, print_note
from broker.errors import UsageError
from broker.formatting import format_date, strip_control
from broker.serve.keys import ApiKey, KeyUsage, create_key, read_keys, read_usage, revoke_key
from broker.serve.replicas import find_folder

app = typer.Typer(
    help="Manage the API keys of a service.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
ServiceName = Annotated[str, typer.Argument(metavar="SERVICE", help="Service name.", show_default=False)]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")


@app.command()
def create(
    service: ServiceName,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the key, such as its user.")] = "default",
    requests_per_minute: Annotated[
        int | None, typer.Option("--requests-per-minute", metavar="N", min=1, help="Maximum requests per minute.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option("--tokens-per-minute", metavar="N", min=1, help="Maximum tokens per minute.")
    ] = None,
    budget_tokens: Annotated[
        int | None, typer.Option("--budget-tokens", metavar="N", min=1, help="Maximum tokens in total.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="TIME", help="Expire after this time, e.g. 30d.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Create an API key and print it once.

    From the first key on, the service admits only requests with a key.
    """
    check_embedded("serve keys")
    context = make_context()
    found = find_service(context, service)
    check_keys_available(context, found)
    folder = find_folder(context.config, found)
    if not NAME.fullmatch(name):
        raise UsageError(f"invalid key name `{name}`", hints=["use letters, digits and `. _ @ -`, at most 63"])
    now_s = context.clock.now_s()
    context.store.services.note_keys(found)  # first, so that the service is never served without the key
    key, text = create_key(
        folder, name, now_s=now_s, expires_s=None if expires is None else now_s + read_lifetime_s(expires),
        requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute, budget_tokens=budget_tokens,
    )  # fmt: skip
    if as_json:
        print_json({**describe_key(key, KeyUsage()), "key": text})
        return
    print_line(text)
    print_note(f"key `{name}` of service {service}; store it now: it is not shown again")


@app.command("list")
def list_keys(service: ServiceName, as_json: options.AsJson = False) -> None:
    """List API keys with their limits and usage."""
    check_embedded("serve keys")
    context = make_context()
    folder = find_folder(context.config, find_service(context, service))
    ring, used = read_keys(folder), read_usage(folder).keys
    keys = sorted(ring.keys.values(), key=lambda each: each.created_s)
    if as_json:
        print_json([describe_key(each, used.get(each.id, KeyUsage())) for each in keys])
        return
    if not keys:
        print_line(f"No keys; create one with `broker serve keys create {service}`")
        return
    now_s = context.clock.now_s()
    for row in format_table(
        ["ID", "NAME", "STATUS", "REQUESTS", "TOKENS", "BUDGET", "TOKENS/MIN", "EXPIRES"],
        [_list_cells(each, used.get(each.id, KeyUsage()), now_s) for each in keys],
        right=("REQUESTS", "TOKENS", "BUDGET", "TOKENS/MIN"),
    ):
        print_line(row)


@app.command()
def revoke(
    service: ServiceName,
    key: Annotated[str, typer.Argument(metavar="KEY", help="ID or name of the key.", show_default=False)],
) -> None:
    """Revoke an API key; requests with it are refused at once."""
    check_embedded("serve keys")
    context = make_context()
    found = revoke_key(
        find_folder(context.config, find_service(context, service)), key, now_s=context.clock.now_s()
    )  # fmt: skip
    print_line(f"Revoked key {strip_control(found.name)} ({found.id}) of service {service}")


def read_lifetime_s(text: str) -> float:
    """Read the lifetime of a key, in seconds. Raises UsageError if it is invalid."""
    from broker.task.measures import Duration

    measure = Duration(bare_unit="d")
    if not re.fullmatch(measure.pattern, text):
        raise UsageError(f"`--expires` must be {measure.expected}, not `{text}`", hints=["for example `--expires 30d`"])
    return float(measure.convert(text))


def describe_key(key: ApiKey, usage: KeyUsage) -> dict[str, object]:
    """Return a key without its hash, JSON-ready."""
    return {
        "id": key.id,
        "name": key.name,
        "created_s": key.created_s,
        "expires_s": key.expires_s,
        "revoked_s": key.revoked_s,
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "budget_tokens": key.budget_tokens,
        "requests": usage.requests,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }


def _list_cells(key: ApiKey, usage: KeyUsage, now_s: float) -> list[str]:
    is_expired = key.expires_s is not None and now_s >= key.expires_s
    status = "REVOKED" if key.revoked_s is not None else "EXPIRED" if is_expired else "ACTIVE"
    return [
        key.id, strip_control(key.name), status, f"{usage.requests:,}", f"{usage.tokens:,}",
        "-" if key.budget_tokens is None else f"{key.budget_tokens:,}",
        "-" if key.tokens_per_minute is None else f"{key.tokens_per_minute:,}",
        "-" if key.expires_s is None else format_date(key.expires_s),
    ]  # fmt: skip
