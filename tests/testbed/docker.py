"""A real docker on a simulated machine: its daemon, and an image of this machine's own programs. Nothing is pulled."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

from tests.testbed.host import Host
from tests.testbed.world import PATH

PROGRAMS = ("docker", "dockerd", "containerd", "runc")
INSIDE = ("sh", "bash", "cat", "true", "grep", "sleep", "printenv", "wc", "touch", "id")
# A namespace of its own shows a new /sys, without the groups that containers are kept in.
START = r"""
set -e
mount -t tmpfs -o mode=755 cgroup /sys/fs/cgroup
sed -n 's/^[0-9]*:\([a-z][a-z]*\):.*/\1/p' /proc/1/cgroup | while read -r each; do
  mkdir "/sys/fs/cgroup/$each"; mount -t cgroup -o "$each" cgroup "/sys/fs/cgroup/$each"
done
[ -n "$(ls /sys/fs/cgroup)" ] || mount -t cgroup2 cgroup2 /sys/fs/cgroup
setsid dockerd --storage-driver=vfs --iptables=false --bridge=none >/var/log/dockerd.log 2>&1 </dev/null &
for each in $(seq 300); do
  docker info >/dev/null 2>&1 && exit 0
  kill -0 $! || break
  sleep 0.1
done
tail -n 3 /var/log/dockerd.log >&2
exit 1
"""


def find_obstacle() -> str:
    """Return why docker is not available here, or an empty string."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
    return f"needs a docker engine: apt-get install docker.io ({', '.join(missing)} not found)" if missing else ""


def start_docker(host: Host, image: str, shared: Path) -> str:
    """Start the daemon on `host` with `image` in its store; return what prevents it, or an empty string."""
    archive = shared / "image.tar"
    archive.write_bytes(make_image())
    done = host.try_execute("sh", "-c", START)
    if done.returncode:
        return f"no docker daemon runs here: {done.stderr.strip()[-500:]}"
    host.execute("docker", "import", "--change", "ENV FROM_IMAGE=yes", str(archive), image)
    # An action that a container may not perform here, as in some nested environments, is no fault of broker.
    done = host.try_execute("docker", "run", "--rm", "--network", "host", image, "true")
    return f"no container runs here: {done.stderr.strip()[-500:]}" if done.returncode else ""


def make_image() -> bytes:
    """Make a root folder with a shell and little else, as a tar archive."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        files: dict[str, Path] = {}
        for name in INSIDE:
            program = Path(str(shutil.which(name, path="/usr/bin:/bin"))).resolve()
            files[f"bin/{name}"] = program
            linked = subprocess.run(["ldd", str(program)], capture_output=True, text=True).stdout
            files |= {path.lstrip("/"): Path(path).resolve() for path in re.findall(r"/[^ )]+", linked)}
        for name, path in files.items():
            archive.add(path, arcname=name)
        for name in ("tmp", "etc", "root"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o777 if name == "tmp" else 0o755
            archive.addfile(entry)
    return packed.getvalue()
