"""A real Slurm on this machine: munged, slurmctld and three slurmd, with a low and a high partition."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from broker.serve.replicas import draw_free_port

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PACKAGES = {
    "munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "srun": "slurm-client",
}  # fmt: skip
READY_S_MAX = 300.0
GRACE_S = 20
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={port0} CPUs=4 RealMemory=8000 State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=4 RealMemory=8000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=4 RealMemory=8000 State=UNKNOWN
PartitionName=low Nodes=n0,n1,n2 Default=YES PriorityTier=1 PreemptMode=CANCEL GraceTime={grace_s} State=UP
PartitionName=high Nodes=n0,n1,n2 PriorityTier=10 PreemptMode=OFF State=UP
"""


def find_obstacle() -> str:
    """Return why no Slurm can run here; empty if one can."""
    missing = sorted({package for program, package in PACKAGES.items() if not shutil.which(program, path=PATH)})
    return f"a real Slurm needs packages: apt-get install {' '.join(missing)}" if missing else ""


class RealSlurm:
    """Start it; `environment` makes Slurm's commands find it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "state").mkdir(parents=True)
        ports = find_ports(4)
        text = CONF.format(
            host=socket.gethostname().partition(".")[0], root=root, user=getpass.getuser(), grace_s=GRACE_S,
            port=ports[0], port0=ports[1], port1=ports[2], port2=ports[3],
        )  # fmt: skip
        (root / "slurm.conf").write_text(text)
        key = root / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(root / "slurm.conf"),
            "PATH": f"{PATH}:{os.environ['PATH']}",
        }

    def start(self) -> RealSlurm:
        names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        paths = [f"--{option}={self.root / name}" for option, name in names.items()]
        self.run("munged", "--force", f"--seed-file={self.root / 'munge.seed'}", *paths)
        self.run("slurmctld", "-f", str(self.root / "slurm.conf"))
        for name in ("n0", "n1", "n2"):
            self.run("slurmd", "-f", str(self.root / "slurm.conf"), "-N", name)
        end_s = time.monotonic() + READY_S_MAX
        while self.run("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D", is_checked=False).strip() != "3":
            assert time.monotonic() < end_s, (self.root / "slurmctld.log").read_text()
            time.sleep(0.2)
        return self

    def run(self, *argv: str, is_checked: bool = True) -> str:
        done = subprocess.run(argv, capture_output=True, text=True, env=self.environment, cwd=self.root, timeout=300)
        assert done.returncode == 0 or not is_checked, f"{argv}: {done.stderr}"
        return done.stdout

    def submit(self, partition: str, script: str, *options: str) -> int:
        """Submit a foreign job."""
        return int(self.run("sbatch", "--parsable", "-p", partition, "-o", "/dev/null", *options, "--wrap", script))

    def get_state(self, job_id: int) -> str:
        return self.run("squeue", "-h", "-t", "all", "-j", str(job_id), "-o", "%T", is_checked=False).strip()

    def cancel_all(self) -> None:
        self.run("scancel", "--signal=USR1", "--state=RUNNING", "--me", is_checked=False)
        self.run("scancel", "--me", is_checked=False)
        end_s = time.monotonic() + READY_S_MAX
        while self.run("squeue", "-h", is_checked=False).strip() and time.monotonic() < end_s:
            time.sleep(0.2)

    def stop(self) -> None:
        """Cancel all jobs, then stop the daemons."""
        self.cancel_all()
        for name in ("slurmd-n0", "slurmd-n1", "slurmd-n2", "slurmctld", "munged"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self.root / f"{name}.pid").read_text()), signal.SIGTERM)


def find_ports(count: int) -> list[int]:
    ports = list[int]()
    while len(ports) < count:
        ports += {draw_free_port()} - {*ports}
    return ports
