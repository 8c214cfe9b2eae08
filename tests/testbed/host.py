"""A simulated machine, as real as possible without a cloud: own network, processes, root folder and sshd.

It boots as an image does: sshd with fresh host keys, then the boot script as root. The root folder is the machine's own
under an overlay, so all its programs are there and nothing written comes back.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.testbed.world import GATEWAY, METADATA, PATH, run_ip

NUMBERS = itertools.count(1)
ROUTER_MAC = "02:00:00:00:00:01"
READY_S_MAX = 300.0  # generous: a busy machine takes seconds
INIT = r"""
set -e
root=$1 name=$2 address=$3; shift 3
hostname "$name"
mount -t tmpfs -o mode=755 host "$root"
mkdir "$root/upper" "$root/work" "$root/merged"
mount -t overlay overlay -o "lowerdir=/,upperdir=$root/upper,workdir=$root/work" "$root/merged"
cd "$root/merged"
for path in "$@"; do mkdir -p ".$path"; mount --rbind "$path" ".$path"; done
mount -t proc proc proc; mount -t sysfs sysfs sys
mount -t tmpfs -o mode=755 tmpfs dev; mkdir dev/pts dev/shm
for each in null zero full random urandom tty; do touch "dev/$each"; mount --bind "/dev/$each" "dev/$each"; done
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts; ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd; ln -s /proc/self/fd/0 dev/stdin; ln -s /proc/self/fd/1 dev/stdout
ln -s /proc/self/fd/2 dev/stderr
mount -t tmpfs -o mode=1777 tmpfs dev/shm; mount -t tmpfs -o mode=755 tmpfs run; mkdir run/sshd run/old
echo "$HIDDEN" | while read -r path; do
  if [ -n "$path" ] && [ -d ".$path" ]; then mount -t tmpfs -o mode=755 hidden ".$path"; fi
done
pivot_root . run/old; umount -l run/old; rmdir run/old
echo "$name" >/etc/hostname; : >/etc/resolv.conf
printf '127.0.0.1 localhost\n%s %s\n%s metadata.google.internal\n' "$address" "$name" "$METADATA" >/etc/hosts
rm -rf /root/.ssh /root/.aws /root/.config
for folder in "$PYTHON" "$@"; do
  while [ "$folder" != / ]; do folder=$(dirname "$folder"); chmod o+x "$folder"; done
done
printf '#!/bin/sh\nexec kill -USR1 1\n' >/usr/local/sbin/shutdown; chmod 755 /usr/local/sbin/shutdown
trap 'exit 0' USR1
read go; cat >/run/boot; exec </dev/null
/usr/sbin/sshd -E /var/log/sshd.log
sh /run/boot >/var/log/boot.log 2>&1 &
set +e
while :; do sleep 3600 & wait $!; done
"""


class Host:
    """A host. `addresses`: the one peers use first, then its others. It ends on request, or by itself."""

    def __init__(
        self,
        folder: Path,
        name: str,
        addresses: Sequence[str],
        *,
        boot: str = "",
        shared: Sequence[Path] = (),
        hidden: Sequence[Path] = (),
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Set up a host.

        `shared`: folders of this machine that are the same on the host, to read and write; `hidden`: empty there.
        """
        self.name, self.addresses = name, tuple(addresses)
        self._number = next(NUMBERS)
        self._device = f"h{self._number}"
        self._mac = f"02:00:00:01:{self._number >> 8:02x}:{self._number & 255:02x}"
        self._folder = folder / f"{self._number}-{name}"
        self._boot = boot
        self._shared = [str(path) for path in (*shared, *find_other_mounts())]
        self._hidden = [str(path) for path in hidden]
        self._on_end = on_end
        self._lock = threading.Lock()
        self._watcher: threading.Thread | None = None
        self.is_alive = False
        self.on_s = self.off_s = 0.0  # when it was switched on, and when it was off for certain; monotonic

    def start(self) -> Host:
        """Switch the machine on and return; sshd and the boot script follow by themselves."""
        self._folder.mkdir(parents=True)
        self.on_s = time.monotonic()
        environment = {
            "PATH": PATH, "METADATA": METADATA, "PYTHON": str(Path(sys.base_prefix)), "LANG": "C.UTF-8",
            "HIDDEN": "\n".join(self._hidden),
        }  # fmt: skip
        with (self._folder.parent / f"{self._folder.name}.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "sh", "-c", INIT,
                 "init", str(self._folder), self.name, self.addresses[0], *self._shared],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip
        self.pid = self._find_init()
        self._await_own_root()
        self._plug_in()
        assert self._process.stdin
        self._process.stdin.write(f"go\n{self._boot}".encode())
        self._process.stdin.close()
        self.is_alive = True
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def execute(self, *argv: str, stdin: str = "") -> str:
        """Execute as root on its console. Fail the test when the command fails."""
        done = self.try_execute(*argv, stdin=stdin)
        assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def try_execute(self, *argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        environment = {"PATH": PATH, "HOME": "/root"}
        return subprocess.run(
            ["nsenter", "-t", str(self.pid), "-a", *argv], input=stdin, text=True, capture_output=True, env=environment
        )

    def shut_down(self) -> None:
        """Shut down as its own user would. ¶ The command may end with the machine, before it can report success."""
        with contextlib.suppress(AssertionError):
            self.execute("/usr/local/sbin/shutdown", "-h", "now")

    def power_off(self, *, is_silent: bool = False) -> None:
        """Power off silently: the cable is pulled first, so that no peer gets a last message, as in a power loss."""
        with self._lock:
            if not self.is_alive:
                return
            if is_silent:
                self._unplug()
            self.is_alive = False
            os.kill(self.pid, signal.SIGKILL)
        assert self._watcher
        if threading.current_thread() is not self._watcher:
            self._watcher.join()

    def cut_off(self) -> None:
        """Partition the host: it keeps running, but can neither send to nor receive from any peer."""
        self._unplug()

    def reconnect(self) -> None:
        run_ip(f"link set {self._device} up", *self._list_routes())

    def _find_init(self) -> int:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        end_s = time.monotonic() + READY_S_MAX
        while not (text := children.read_text().split()):
            assert self._process.poll() is None and time.monotonic() < end_s, self.read_log()
            time.sleep(0.002)
        return int(text[0])

    def _await_own_root(self) -> None:
        """Wait until the host has left this machine's root folder: a command before that would change this machine."""
        end_s = time.monotonic() + READY_S_MAX
        while Path(f"/proc/{self.pid}/root").samefile("/"):
            assert self._process.poll() is None and time.monotonic() < end_s, self.read_log()
            time.sleep(0.002)

    def _plug_in(self) -> None:
        """Connect a cable to the router, with the router's address fixed: a dead host is a black hole, not an error."""
        run_ip(
            f"link add {self._device} type veth peer name eth0 netns {self.pid}",
            f"link set {self._device} address {ROUTER_MAC} up",
        )
        run_ip(
            "link set lo up",
            f"link set eth0 address {self._mac} up",
            *(f"addr add {address}/32 dev eth0" for address in self.addresses),
            f"neigh add {GATEWAY} lladdr {ROUTER_MAC} dev eth0 nud permanent",
            f"route add default via {GATEWAY} dev eth0 onlink src {self.addresses[0]}",
            pid=self.pid,
        )
        run_ip(*self._list_routes())

    def _list_routes(self) -> list[str]:
        return [
            line
            for address in self.addresses
            for line in (
                f"route replace {address}/32 dev {self._device}",
                f"neigh replace {address} lladdr {self._mac} dev {self._device} nud permanent",
            )
        ]

    def _unplug(self) -> None:
        run_ip(*(f"route replace {address}/32 dev hole" for address in self.addresses))
        run_ip(f"link set {self._device} down")

    def _watch(self) -> None:
        self._process.wait()
        self.off_s = time.monotonic()
        with self._lock:
            was_alive, self.is_alive = self.is_alive, False
            run_ip(*(f"route replace {address}/32 dev hole" for address in self.addresses))
            subprocess.run(["ip", "link", "del", self._device], capture_output=True)
        if was_alive:
            self._on_end()

    def read_log(self) -> str:
        return (self._folder.parent / f"{self._folder.name}.log").read_text()


def find_other_mounts() -> list[Path]:
    """Find other mounts to bind in: an overlay shows one file system, and the running Python may need another."""
    needed = {Path(sys.prefix), Path(sys.base_prefix)}
    return [path for path in sorted(needed) if path.stat().st_dev != Path("/").stat().st_dev]
