"""The first-boot script, run by a real shell in a root folder that is not the machine's."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from broker.runtime.bootstrap import make_boot
from broker.runtime.keys import KeyPair

HOST_KEY = KeyPair(private="-----BEGIN KEY-----\n$HOME `id` 'x'\n-----END KEY-----\n", public="ssh-ed25519 HOST us")
LOGIN = "ssh-ed25519 LOGIN it's us\n"
# Programs that would change the machine, recorded instead of run.
TOOLS = """
id() { [ "$1" = -g ] && echo 1; return 0; }
getent() { case $1 in passwd) echo "u:x:1:1::$ROOT/home/u:/bin/sh" ;; shadow) echo 'u:!:1' ;; esac; }
usermod() { echo "usermod $*" >>"$ROOT/calls"; }
chown() { echo "chown $*" >>"$ROOT/calls"; }
shutdown() { echo "shutdown $*" >>"$ROOT/calls"; }
systemctl() { echo "systemctl $*" >>"$ROOT/calls"; }
kill() { return 0; }
setsid() { :; }
runuser() { echo "runuser $*" >>"$ROOT/calls"; }
"""


def run_boot(root: Path, *, user: str = "u") -> None:
    for folder in ("home/u", "etc/sudoers.d", "etc/ssh", "run"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    script = make_boot(cloud="aws", login=LOGIN, host=HOST_KEY, user=user)
    script = script.replace("/etc/", f"{root}/etc/").replace("/run/", f"{root}/run/")
    command = ["sh", "-eu", "-c", TOOLS + script]
    subprocess.run(command, check=True, env={"ROOT": str(root), "PATH": "/usr/bin:/bin"})


def read_all(root: Path) -> dict[str, tuple[int, str]]:
    files = (path for path in root.rglob("*") if path.is_file() and path.name != "calls")
    return {str(path.relative_to(root)): (path.stat().st_mode & 0o777, path.read_text()) for path in files}


@pytest.mark.parametrize("has_include", [True, False])
def test_boot_installs_keys_and_user_and_a_second_run_changes_nothing(tmp_path: Path, has_include: bool) -> None:
    config = tmp_path / "etc/ssh/sshd_config"
    config.parent.mkdir(parents=True)
    config.write_text((f"Include {tmp_path}/etc/ssh/sshd_config.d/*.conf\n" if has_include else "") + "UsePAM yes\n")
    run_boot(tmp_path)
    first = read_all(tmp_path)
    assert first["etc/ssh/broker_host_key"] == (0o600, HOST_KEY.private)
    assert first["home/u/.ssh/authorized_keys"] == (0o600, LOGIN)
    node = json.loads(first["home/u/.broker/node.json"][1])
    assert node == {"power_off": ["sudo", "-n", "shutdown", "-h", "now"], "notices": "aws"}
    assert first["etc/sudoers.d/90-broker"] == (0o440, "u ALL=(ALL) NOPASSWD:ALL\n")
    where = "etc/ssh/sshd_config.d/00-broker.conf" if has_include else "etc/ssh/sshd_config"
    # sshd takes the first value that it reads.
    assert first[where][1].startswith(f"HostKey {tmp_path}/etc/ssh/broker_host_key\nMaxStartups 256")
    assert "UsePAM yes" in first["etc/ssh/sshd_config"][1]
    assert "usermod -p * u" in (tmp_path / "calls").read_text()
    run_boot(tmp_path)
    assert read_all(tmp_path) == first


@pytest.mark.parametrize(
    ("lease", "is_ended"), [(None, False), ('{"boot": "an earlier one"}', True), ('{"boot": "@BOOT@"}', False)]
)
def test_restarted_node_ends_unless_its_broker_leases_it_again(
    tmp_path: Path, lease: str | None, is_ended: bool
) -> None:
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    run_boot(tmp_path)
    calls = tmp_path / "calls"
    assert "systemctl enable broker-restarted.service" in calls.read_text()
    unit = (tmp_path / "etc/systemd/system/broker-restarted.service").read_text()
    assert f'ExecStart={tmp_path}/etc/broker/restarted "{tmp_path}/home/u" "u"\nKillMode=process\n' in unit
    calls.write_text("")
    if lease is not None:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        (tmp_path / "home/u/.broker/lease.json").write_text(lease.replace("@BOOT@", boot))
    script = (tmp_path / "etc/broker/restarted").read_text()
    command = ["sh", "-eu", "-c", TOOLS + 'sleep() { echo "sleep $*" >>"$ROOT/calls"; }\n' + script, "sh"]
    environment = {"ROOT": str(tmp_path), "PATH": "/usr/bin:/bin"}
    subprocess.run([*command, str(tmp_path / "home/u"), "u"], check=True, env=environment)
    assert calls.read_text() == "sleep 1800.000\n" + ("shutdown -h now\n" if is_ended else "")
    calls.write_text("")
    (tmp_path / "home/u/.broker/autostop.json").write_text("{}")
    subprocess.run([*command, str(tmp_path / "home/u"), "u"], check=True, env=environment)
    begun = (
        f"runuser -u u -- env HOME={tmp_path}/home/u python3 -I -S {tmp_path}/home/u/.broker/agent/agent.py _restarted"
    )
    assert calls.read_text().splitlines()[:2] == [begun, "sleep 1800.000"], (
        "the watcher of the autostop rule runs again"
    )


def test_same_keys_give_the_same_script_and_its_host_key_is_in_no_repr() -> None:
    boots = {make_boot(cloud="gcp", login=LOGIN, host=HOST_KEY) for _ in range(2)}
    assert len(boots) == 1
    assert "BEGIN KEY" not in repr(HOST_KEY)


def test_a_node_whose_agent_is_never_called_ends_after_half_an_hour_by_default() -> None:
    assert "sleep 1800.000" in make_boot(cloud="aws", login=LOGIN, host=HOST_KEY)
    assert "sleep 60.000" in make_boot(cloud="aws", login=LOGIN, host=HOST_KEY, unclaimed_minutes=1)


def test_root_needs_no_sudo() -> None:
    assert '"power_off": ["shutdown", "-h", "now"]' in make_boot(cloud="x", login=LOGIN, host=HOST_KEY, user="root")
