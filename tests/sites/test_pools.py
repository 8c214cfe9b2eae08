"""The hosts file: SkyPilot's form, every error with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.errors import TaskError
from broker.sites.facts import Machine, write_facts
from broker.sites.pools import Host, list_offers, read_hosts, read_pools

SKYPILOT = """\
lab:
  user: ubuntu
  identity_file: ~/.ssh/lab
  hosts:
    - 10.0.0.1
    - ip: 10.0.0.2
      user: alice
      identity_file: /keys/alice
      accelerators: H100:8
      cpus: 96
      memory: 1000
      usd_hour: 12.5
    - gpu-box
"""


def read(tmp_path: Path, text: str) -> list[Host]:
    path = tmp_path / "ssh_pools.yaml"
    path.write_text(text)
    return list(read_hosts(path, tmp_path / "facts.json"))


def test_skypilots_form_is_read_with_the_pools_defaults(tmp_path: Path) -> None:
    first, second, third = read(tmp_path, SKYPILOT)
    assert (first.key, first.login.user, first.login.identity_file) == (
        "lab/10.0.0.1",
        "ubuntu",
        Path("~/.ssh/lab").expanduser(),
    )
    assert (second.login.user, second.login.identity_file) == ("alice", Path("/keys/alice"))
    assert second.machine == Machine(vcpus=96, memory_gib=1000, accelerator="H100", accelerator_count=8)
    assert (third.name, third.machine) == ("gpu-box", None)


@pytest.mark.parametrize("place", ["pool", "host"])
def test_password_is_refused_with_its_place_and_not_shown(tmp_path: Path, place: str) -> None:
    at = {"pool": "  password: hunter2\n", "host": ""}[place]
    host = {"pool": "    - 10.0.0.1\n", "host": "    - {ip: 10.0.0.1, password: hunter2}\n"}[place]
    with pytest.raises(TaskError) as caught:
        read(tmp_path, f"lab:\n{at}  hosts:\n{host}")
    (issue,) = caught.value.issues
    assert (issue.line, "ssh-copy-id" in (issue.hint or "")) == ({"pool": 2, "host": 3}[place], True)
    assert "hunter2" not in repr(issue)


def test_every_error_is_reported_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(TaskError) as caught:
        read(tmp_path, "lab:\n  hosts: []\n  usr: x\nspare:\n  hosts: [{ip: 10.0.0.1, port: 0}]\n")
    assert [(issue.line, issue.message.partition("`")[0]) for issue in caught.value.issues]
    assert {issue.line for issue in caught.value.issues} == {2, 3, 5}


def test_host_that_is_listed_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TaskError) as caught:
        read(tmp_path, "lab:\n  hosts: [a, b, a]\n")
    assert "listed twice" in caught.value.message


def test_detected_size_fills_in_what_the_file_leaves_open(tmp_path: Path) -> None:
    found = Machine(vcpus=8, memory_gib=32, accelerator="L4", accelerator_count=1)
    write_facts(tmp_path / "facts.json", {"lab/10.0.0.1": found, "lab/10.0.0.2": found})
    first, second, third = read(tmp_path, SKYPILOT)
    assert first.machine == found
    assert second.machine and second.machine.accelerator == "H100", "stated values are kept"
    assert third.machine is None


def test_equal_hosts_form_one_offer_and_hosts_that_are_off_none(tmp_path: Path) -> None:
    size = "cpus: 8, memory: 32"
    odd = "{ip: d, cpus: 9, memory: 1, is_off: true}"
    hosts = read(
        tmp_path,
        f"lab:\n  hosts: [{{ip: a, {size}}}, {{ip: b, {size}}}, {{ip: c, {size}, usd_hour: 1}}, {odd}, e]\n",
    )
    offers = list_offers(hosts)
    assert [(offer.region, offer.zone, offer.instance_type, offer.ondemand_usd_hour) for offer in offers] == [
        ("lab", None, "8cpu-32gb", 0.0),
        ("lab", None, "8cpu-32gb", 1.0),
    ]


def test_empty_file_has_no_pool(tmp_path: Path) -> None:
    (tmp_path / "ssh_pools.yaml").write_text("# none yet\n")
    assert read_pools(tmp_path / "ssh_pools.yaml") == {}
