"""Fakes for nodes of the local cloud: `nvidia-smi`, the kernel log, torch and a slow network.

The first node that asks has the fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SMI = """\
#!/bin/sh
here=$(dirname "$0"); node=$(basename "$(dirname "$HOME")"); fault=$(cat "$here/fault"); ecc=0
case "$*" in *=uuid,*) ;; *) exit 1 ;; esac
ln -s "$node" "$here/sick" 2>/dev/null
[ "$(readlink "$here/sick")" = "$node" ] || fault=none
[ $fault = driver ] && { echo "NVIDIA-SMI has failed because it could not talk to the driver"; exit 9; }
[ $fault = ecc ] && ecc=2
[ $fault = xid ] && xid="4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."
printf '%s' "$xid" > "$here/kernel.log"
echo "GPU-$node-0, 13-$node, NVIDIA A100-SXM4-80GB, 0"
[ $fault = missing ] || echo "GPU-$node-1, 14-$node, NVIDIA A100-SXM4-80GB, $ecc"
"""
# Its clock is virtual: a slow machine must not look like a slow GPU.
TORCH = """\
import os, time
now_s = 0.0
time.perf_counter = lambda: now_s
node = os.path.basename(os.path.dirname(os.environ["HOME"]))
here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
is_slow = open(here + "/fault").read() == "slow" and os.readlink(here + "/sick") == node
bfloat16 = float16 = None
class Matrix:
    def __matmul__(self, other):
        return self
class Properties:
    def __init__(self, index):
        self.uuid = f"{node}-{index}"
def ones(shape, *, dtype, device):
    return Matrix()
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
    get_device_properties = Properties
    get_device_capability = staticmethod(lambda index: (8, 0))
    @staticmethod
    def synchronize(index):
        global now_s
        now_s += 1.0 if is_slow and index == 1 else 0.01
"""
# Slow sockets of the same class as real ones; each call is limited.
SLOW_SOCKETS = """\
import os, socket, time
node = os.path.basename(os.path.dirname(os.environ["HOME"]))
here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if open(here + "/fault").read() == "network" and os.readlink(here + "/sick") == node:
    class SlowSocket(socket.socket):
        def send(self, data):
            time.sleep(0.02)
            return super().send(data[:4096])
        def recv_into(self, buffer):
            time.sleep(0.02)
            return super().recv_into(buffer, 4096)
    socket.socket = SlowSocket
"""


@dataclass(frozen=True)
class FakeGpus:
    folder: Path

    def plant(self, fault: str) -> None:
        (self.folder / "fault").write_text(fault)

    @property
    def envs(self) -> dict[str, str]:
        """Return the variables of a task that make its nodes use the fakes."""
        return {"BROKER_KERNEL_LOG": str(self.folder / "kernel.log"), "PYTHONPATH": str(self.folder / "python")}

    def read_sick(self) -> str:
        """Return the node that has the fault."""
        return str((self.folder / "sick").readlink())


def make_fake_gpus(folder: Path) -> FakeGpus:
    (folder / "python").mkdir(parents=True)
    (folder / "python" / "torch.py").write_text(TORCH)
    (folder / "python" / "sitecustomize.py").write_text(SLOW_SOCKETS)
    (folder / "nvidia-smi").write_text(SMI)
    (folder / "nvidia-smi").chmod(0o755)
    fake = FakeGpus(folder)
    fake.plant("none")
    return fake
