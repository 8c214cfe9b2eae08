"""A real sshd on the loopback as the current user: one node that boots on request."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from broker.runtime.keys import HOST, LOGIN, Keys
from broker.serve.replicas import draw_free_port
from broker.types import Node, NodeState

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
REASON = "needs OpenSSH's server: `apt-get install openssh-server`"
START_S_MAX = 300.0


class Sshd:
    """A server whose users are those of this machine; home is the folder it was given."""

    def __init__(self, folder: Path, keys: Keys, *, token: str = "token-1", host_key: Path | None = None) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        gang = keys.ensure("c", token)
        self.port = draw_free_port()
        (folder / "authorized_keys").write_text(gang.read(LOGIN).public)
        (folder / "sshd_config").write_text(
            f"ListenAddress 127.0.0.1\nPort {self.port}\nHostKey {host_key or gang.folder / HOST}\n"
            f"AuthorizedKeysFile {folder / 'authorized_keys'}\nStrictModes no\nUsePAM no\nPidFile none\n"
            # Every session starts in a home of its own, as on another machine.
            f'SetEnv HOME={self.home}\nForceCommand cd {self.home} && eval "$SSH_ORIGINAL_COMMAND"\n'
            "MaxStartups 100\nMaxSessions 100\n"
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.node = Node(
            id="n1", cloud="aws", owner="me", cluster="c", attempt=1, rank=0, state=NodeState.RUNNING, token=token,
            address="127.0.0.1", handle=f"ssh://{getpass.getuser()}@127.0.0.1:{self.port}",
        )  # fmt: skip

    def start(self) -> None:
        assert SSHD
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # root's sshd insists on it
        log = (self.folder / "sshd.log").open("ab")
        self._process = subprocess.Popen([SSHD, "-D", "-e", "-f", self.folder / "sshd_config"], stderr=log)

    def wait(self) -> None:
        end_s = time.monotonic() + START_S_MAX
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert time.monotonic() < end_s, (self.folder / "sshd.log").read_text()
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop with every session, like a machine that is switched off."""
        if self._process:
            subprocess.run(["pkill", "-KILL", "-P", str(self._process.pid)], check=False)
            self._process.kill()
            self._process.wait()
            self._process = None
