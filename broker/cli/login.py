"""`broker login` and `broker logout`: choose the server that commands run on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from broker.cli.render import print_line
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
    fingerprint: Annotated[
        str | None,
        typer.Option("--fingerprint", metavar="sha256:HEX", help="Certificate to accept, as the server printed it."),
    ] = None,
) -> None:
    """Log in to a server; commands then run there."""
    from broker.client.login import ServerLogin, check_login, save_login
    from broker.client.remote import RemoteSession, check_handshake

    found = ServerLogin(url=url.rstrip("/"), token=_read_token(token, token_file), fingerprint=fingerprint)
    check_login(found)
    answer = check_handshake(RemoteSession(found))
    save_login(find_home() / LOGIN, found)
    print_line(f"Logged in to {found.url} as {answer.user} ({answer.role.value}), server version {answer.version}")


def _read_token(token: str | None, file: Path | None) -> Secret:
    if token is None and file is None:
        raise UsageError("a token is required", hints=["pass `--token-file FILE`, or `--token-file -` to read stdin"])
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
