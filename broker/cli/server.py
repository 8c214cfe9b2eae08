"""`broker server`: share this installation among several users, and manage their tokens."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from broker.cli import options, server_host, server_limits
from broker.cli.context import make_context
from broker.cli.log_lines import start_log
from broker.cli.render import print_json, print_line, print_note, print_table
from broker.config import choose_state_url
from broker.errors import UsageError
from broker.formatting import format_date, format_duration, format_usd, to_plain
from broker.state.people import Role
from broker.state.secret_rows import load_key

if TYPE_CHECKING:
    from broker.app.container import Context
    from broker.server.proxy import TrustedProxy

app = typer.Typer(
    help="Share one installation among several users.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
token_app = typer.Typer(help="Create, list and revoke access tokens.", no_args_is_help=True)
app.add_typer(token_app, name="token")
app.add_typer(server_limits.app, name="limits")
app.command()(server_host.up)
app.command()(server_host.upgrade)
app.command()(server_host.status)
app.command()(server_host.down)
app.command()(server_host.restore)
app.command(name="import-local")(server_host.import_local)

StateOption = Annotated[
    str | None, typer.Option("--state", metavar="URL", help="PostgreSQL database of the state (default: a file).")
]
HostOption = Annotated[
    str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on; all but loopback addresses use TLS.")
]
PortOption = Annotated[
    int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="Port to listen on (0: any free one).")
]
ControllerOption = Annotated[
    bool, typer.Option("--controller/--no-controller", help="Run the job controllers on this machine.")
]
LocalCloudOption = Annotated[
    bool, typer.Option("--local-cloud", help="Let tasks run on this machine, as the server's own user.")
]
CertificateOption = Annotated[
    Path | None,
    typer.Option("--certificate", metavar="FILE", help="PEM certificate (default: self-signed by the server)."),
]
KeyOption = Annotated[Path | None, typer.Option("--key", metavar="FILE", help="PEM private key of --certificate.")]
ProxyHeaderOption = Annotated[
    str | None,
    typer.Option("--trusted-proxy-header", metavar="HEADER", help="Header in which a trusted proxy names the user."),
]
ProxiesOption = Annotated[
    list[str] | None,
    typer.Option("--trusted-proxy", metavar="ADDRESS", help="IP address of the proxy. Repeatable."),
]
ProxySecretOption = Annotated[
    Path | None,
    typer.Option(
        "--trusted-proxy-secret-file", metavar="FILE", help="Secret that the proxy sends in Broker-Proxy-Secret."
    ),
]
ProxyRoleOption = Annotated[Role, typer.Option("--trusted-proxy-role", help="Role of users that the proxy names.")]


@app.callback()
def root(context: typer.Context) -> None:
    """Share one installation among several users."""
    server_host.check_group(context.invoked_subcommand)


@app.command()
def start(
    host: HostOption = "127.0.0.1",
    port: PortOption = server_host.PORT,
    state: StateOption = None,
    controller: ControllerOption = True,
    local_cloud: LocalCloudOption = False,
    certificate: CertificateOption = None,
    proxy_header: ProxyHeaderOption = None,
    proxies: ProxiesOption = None,
    proxy_secret: ProxySecretOption = None,
    proxy_role: ProxyRoleOption = Role.USER,
    key: KeyOption = None,
) -> None:
    """Start the server and run until SIGTERM or Ctrl-C.

    Jobs and clusters continue while the server is stopped.
    """
    try:
        from broker.server.context import Policy
        from broker.server.serving import Certificate, Listening
        from broker.server.starting import run_server
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the server requires `{error.name}`", hints=["install it: `pip install 'intercloud-broker[serve]'`"]
        ) from None
    if (certificate is None) != (key is None):
        raise UsageError("`--certificate` and `--key` require each other")
    if proxy_header is None and (proxies or proxy_secret is not None):
        raise UsageError("`--trusted-proxy` requires `--trusted-proxy-header`")
    if state is not None:
        choose_state_url(state)
    context = make_context()
    proxy = _read_proxy(context, proxy_header, proxies or (), proxy_secret, proxy_role)
    start_log(context.config, level=logging.WARNING)

    def show(listening: Listening) -> None:
        print_line(f"Server: {listening.url}")
        if listening.fingerprint:
            print_line(f"Fingerprint: {listening.fingerprint}")
        print_note("press Ctrl-C to stop it; jobs continue")

    run_server(
        context, host=host, port=port,
        policy=Policy(has_controller=controller, has_local_cloud=local_cloud, proxy=proxy),
        certificate=Certificate(certificate=certificate, key=key) if certificate and key else None,
        on_token=lambda path: print_note(
            f"wrote the token of `admin` to {path}; log in with `broker login URL --token-file {path}`"
        ),
        on_ready=show,
    )  # fmt: skip


def _read_proxy(
    context: Context, header: str | None, addresses: Sequence[str], secret_file: Path | None, role: Role
) -> TrustedProxy | None:
    """Return the trusted proxy that the options and `config.toml` describe; None without a header."""
    if header is None:
        return None
    from broker.server.proxy import TrustedProxy, read_projects

    return TrustedProxy.read(
        header=header, addresses=addresses, secret_file=secret_file, role=role,
        projects=read_projects(context.config.home),
    )  # fmt: skip


@app.command()
def controller(state: StateOption = None) -> None:
    """Run the job controllers until SIGTERM.

    For servers started with `--no-controller`.
    """
    from broker.cli.daemon import run_controllers

    if state is not None:
        choose_state_url(state)
    context = make_context()
    if context.store.is_shared:
        load_key(context.config.home)  # an invalid key must not wait for a job with secrets
    start_log(context.config)
    asyncio.run(run_controllers(context, idle_s=math.inf))


@token_app.command()
def create(
    user: Annotated[str, typer.Argument(metavar="USER", help="User name, e.g. an email address.", show_default=False)],
    role: Annotated[Role, typer.Option("--role", help="Permissions of the token.")] = Role.USER,
    days: Annotated[
        float, typer.Option("--days", metavar="DAYS", min=0, help="Days until it expires (0 = never).")
    ] = 90,
    project: Annotated[
        str, typer.Option("--project", metavar="NAME", help="Project whose limits also apply.", show_default=False)
    ] = "",
    as_json: options.AsJson = False,
) -> None:
    """Create a token and print it once."""
    from broker.server.tokens import create_token

    made = create_token(make_context().store, user=user, role=role, days=days or None, project=project)
    if as_json:
        print_json({"id": made.id, "token": made.value.value})
        return
    print_line(made.value.value)
    print_note(f"token {made.id} of {user} ({role.value}) cannot be shown again; revoke it with its ID")


@token_app.command(name="list")
def list_tokens(as_json: options.AsJson = False) -> None:
    """List tokens, without their values."""
    context = make_context()
    tokens = context.store.tokens.list()
    if as_json:
        print_json(to_plain(list(tokens)))
        return
    now_s = context.clock.now_s()

    def show(token_end_s: float | None, revoked_s: float | None) -> str:
        if revoked_s is not None:
            return "revoked"
        if token_end_s is None:
            return "never"
        return "expired" if token_end_s <= now_s else format_date(token_end_s)

    rows = [
        [str(each.id), each.user, each.role.value, each.project or "-", show(each.expires_s, each.revoked_s)]
        for each in tokens
    ]
    print_table(["ID", "USER", "ROLE", "PROJECT", "EXPIRES"], rows, right=("ID",))


@token_app.command()
def revoke(token: Annotated[int, typer.Argument(metavar="TOKEN", help="Token ID.", show_default=False)]) -> None:
    """Revoke a token; requests with it are refused at once."""
    if not make_context().store.tokens.revoke(token):
        raise UsageError(f"token {token} is unknown or revoked", hints=["list tokens with `broker server token list`"])
    print_line(f"revoked token {token}")


@app.command()
def audit(
    newest: Annotated[int, typer.Option("--newest", metavar="N", min=1, help="Number of entries.")] = 50,
    as_json: options.AsJson = False,
) -> None:
    """List who changed what through the server."""
    found = make_context().store.audit.list(newest=newest)
    if as_json:
        print_json(to_plain(list(found)))
        return
    rows = [
        [time.strftime("%m-%d %H:%M:%S", time.localtime(each.time_s)), each.user, each.verb, each.target, each.outcome]
        for each in found
    ]
    print_table(["TIME", "USER", "VERB", "TARGET", "OUTCOME"], rows, firm=("TIME",))


@app.command()
def users(as_json: options.AsJson = False) -> None:
    """List users with their role, jobs, clusters and cost."""
    from broker.dashboard.people import read_people

    context = make_context()
    people, now_s = read_people(context), context.clock.now_s()
    if as_json:
        print_json(to_plain(list(people)))
        return
    rows = [
        [
            each.user or "-", "-" if each.role is None else each.role.value, str(each.token_count),
            "-" if each.changed_s is None else f"{format_duration(max(0.0, now_s - each.changed_s))} ago",
            str(each.live_jobs), str(each.jobs), str(each.clusters), format_usd(each.month_usd),
        ]
        for each in people
    ]  # fmt: skip
    heads = ["USER", "ROLE", "TOKENS", "CHANGED", "LIVE", "JOBS", "CLUSTERS", "USD/MONTH"]
    print_table(heads, rows, right=("TOKENS", *heads[4:]))
