"""A sealed network namespace for real hosts, with no way out: `python -m tests.testbed.world COMMAND...`

Everything that runs in it, host or program, dies with it: nothing a test leaves behind outlives the command.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

GATEWAY, METADATA = "169.254.1.1", "169.254.169.254"
CONTROL = "10.255.0.1"  # address of the simulated clouds
INSIDE = "BROKER_TESTBED_WORLD"
PACKAGES = {
    "ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "unshare": "util-linux", "sudo": "sudo",
    "rsync": "rsync",
}  # fmt: skip
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def find_obstacle() -> str:
    """Return why no sealed network can be made here, with a remedy; empty when one can."""
    if not sys.platform.startswith("linux"):
        return "the test-bed of real hosts needs Linux"
    missing = sorted(package for program, package in PACKAGES.items() if not shutil.which(program, path=PATH))
    if missing:
        return f"the test-bed needs programs: apt-get install {' '.join(missing)}"
    if os.geteuid() != 0:
        return "the test-bed makes network namespaces: run `make testbed` as root"
    folder = Path(tempfile.gettempdir()).resolve()
    if folder.parts[1:2] in (("dev",), ("proc",), ("run",), ("sys",)):
        return f"pretend machines have a /{folder.parts[1]} of their own: set TMPDIR elsewhere, it is {folder}"
    trial = "mount -t tmpfs tmpfs /mnt && ip link add one type veth peer name two"
    done = subprocess.run([*UNSHARE, "sh", "-c", trial], capture_output=True, text=True)
    return f"no namespaces may be made here: {done.stderr.strip()}" if done.returncode else ""


UNSHARE = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def build() -> None:
    """Add addresses of gateway, metadata server and clouds, and a black hole for dead hosts; called once inside."""
    run_ip(
        "link set lo up",
        *(f"addr add {address}/32 dev lo" for address in (GATEWAY, METADATA, CONTROL)),
        "link add hole type veth peer name hole-end",
        "link set hole arp off up",
        "link set hole-end arp off up",
    )
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def run_ip(*lines: str, pid: int | None = None) -> None:
    """Run a batch for `ip`, in the network of process `pid` or our own."""
    enter = ["nsenter", "-t", str(pid), "-n"] if pid else []
    text = "\n".join(lines) + "\n"
    done = subprocess.run([*enter, "ip", "-batch", "-"], input=text, text=True, capture_output=True)
    assert done.returncode == 0, f"{done.stderr}{text}"


def main(command: Sequence[str]) -> int:
    if obstacle := find_obstacle():
        sys.stderr.write(f"error: {obstacle}\n")
        return 1
    os.environ[INSIDE] = "1"
    os.execvp(UNSHARE[0], [*UNSHARE, *command])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
