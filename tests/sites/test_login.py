"""The login to a user's own machine, whose shell has start-up files of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.errors import AuthError, TransientError
from broker.sites.login import SshLogin


@pytest.mark.parametrize("start", ["", "echo Welcome to Tiger; printf 'modules: '; "])
def test_what_the_start_up_files_of_a_host_print_is_not_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    """The names of Slurm's nodes began with the words of a login node's greeting."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\n{start}for last; do :; done\neval "$last"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    done = asyncio.run(SshLogin(host="login").run("cat; exit 3", stdin=b"node1\nnode2\n", timeout_s=300.0))
    assert (done.returncode, done.stdout) == (3, b"node1\nnode2\n")


@pytest.mark.parametrize(
    ("text", "kind", "hint"),
    [
        ("me@login: Permission denied (publickey).", AuthError, "`ssh login`"),
        ("Received disconnect from 192.0.2.1 port 22:2: Too many authentication failures", AuthError, "identity_file"),
        ("ssh: connect to host login port 22: Connection timed out", TransientError, ""),
    ],
)
def test_a_refused_login_is_distinguished_from_a_silent_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, kind: type[AuthError | TransientError], hint: str
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\necho '{text}' >&2\nexit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(kind) as caught:
        asyncio.run(SshLogin(host="login").run("true", timeout_s=300.0))
    assert hint in "".join(caught.value.hints)
