"""`broker login` and `broker logout`: choose the server that commands run on."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from broker.cli.render import print_line, print_note
from broker.config import LOGIN, find_home, find_login
from broker.errors import UsageError
from broker.types import Secret


def login(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="URL that `broker server start` printed.", show_default=False)
    ],
    token: Annotated[
        str | None,
        typer.Option(
            "--token", metavar="TOKEN", help="Token. Other users of this machine can see it; prefer --token-file."
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="File with the token; `-` reads stdin.")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a browser to log in (--no-browser: print the URL).")
    ] = True,
    fingerprint: Annotated[
        str | None,
        typer.Option("--fingerprint", metavar="sha256:HEX", help="Certificate to accept, as the server printed it."),
    ] = None,
) -> None:
    """Log in to a server; commands then run there.

    Without a token, log in through a browser if the server has an OIDC issuer.
    """
    from broker.client.login import ServerLogin, check_login, save_login
    from broker.client.remote import RemoteSession, check_handshake

    found = ServerLogin(url=url.rstrip("/"), token=Secret(value=""), fingerprint=fingerprint)
    check_login(found)
    if token is None and token_file is None:
        from broker.client.browser_login import log_in

        found = replace(found, token=log_in(found, lambda page: _show_page(page, opens=browser)))
    else:
        found = replace(found, token=_read_token(token, token_file))
    answer = check_handshake(RemoteSession(found, is_logged_in=False))
    save_login(find_home() / LOGIN, found)
    print_line(f"Logged in to {found.url} as {answer.user} ({answer.role.value}), server version {answer.version}")


def _show_page(page: str, *, opens: bool) -> None:
    """Open a page, and print its address for machines without a browser."""
    if opens:
        import webbrowser

        webbrowser.open(page)
    print_note(f"log in at {page}")
    print_note("the browser must run on this machine, or reach its port through a tunnel")


def _read_token(token: str | None, file: Path | None) -> Secret:
    if file is not None:
        try:
            token = sys.stdin.read() if str(file) == "-" else file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {file}: {error}") from None
    value = (token or "").strip()
    if not value.isascii() or not value.isprintable() or not value or " " in value:
        raise UsageError("the token is empty or damaged", hints=["copy the line that `broker server token` printed"])
    return Secret(value=value)


def logout() -> None:
    """Log out of the server; commands then run on this machine."""
    path = find_login()
    if path is None:
        print_line("Not logged in to a server")
        return
    path.unlink(missing_ok=True)
    print_line("Logged out; the token stays valid until it expires or is revoked")
