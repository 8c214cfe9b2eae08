"""Real hosts behind every machine of the fake clouds.

A host boots with the machine's own boot script, sees its own metadata, and ends with the machine, or the machine with
it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.testbed.ec2 import FakeAws
from tests.testbed.ec2_account import Instance
from tests.testbed.ec2_roles import find_credentials
from tests.testbed.gce import FakeGce
from tests.testbed.host import Host
from tests.testbed.metadata import Guest, MetadataServer


class Bridge:
    """Real hosts for machines; `hosts` is keyed by the cloud's own name of the machine."""

    def __init__(
        self, folder: Path, metadata: MetadataServer, *, aws: FakeAws, gce: FakeGce, shared: Sequence[Path] = (),
        hidden: Sequence[Path] = (),
    ) -> None:  # fmt: skip
        self._folder, self._metadata, self._shared, self._hidden = folder, metadata, shared, hidden
        self._aws, self._gce = aws, gce
        self.hosts: dict[str, Host] = {}
        self._guests: dict[str, Guest] = {}
        self.on_aws_host: Callable[[Host], object] = lambda host: None  # before it counts as running
        aws.account.on_started = self._start_aws
        aws.account.on_ended = lambda instance: self._end(instance.id)
        gce.on_instance = self

    def preempt(self, name: str, *, notice_s: float) -> None:
        """Preempt as a spot market does: a notice, then no power, then the cloud's list says so.

        Return with the notice.
        """
        guest, host = self._guests[name], self.hosts[name]
        guest.give_notice(time.time() + notice_s)

        def take() -> None:
            host.power_off(is_silent=True)
            if guest.cloud == "aws":
                with self._aws.lock:
                    self._aws.account.preempt(name)
            else:
                self._gce.preempt(name)

        timer = threading.Timer(notice_s, take)
        timer.daemon = True
        timer.start()

    def end_all(self) -> None:
        for host in list(self.hosts.values()):
            host.power_off()

    # Compute Engine's hook; called in threads of their own

    def started(self, instance: dict[str, Any]) -> None:
        interface = instance["networkInterfaces"][0]
        addresses = [interface["networkIP"], *(each["natIP"] for each in interface.get("accessConfigs", []))]
        items = {each["key"]: each["value"] for each in instance.get("metadata", {}).get("items", [])}
        name = instance["name"]
        self._start(name, "gcp", addresses, items.get("startup-script", ""), lambda: self._gce.shut_down(name))

    def ended(self, instance: dict[str, Any]) -> None:
        self._end(instance["name"])

    def _start_aws(self, instance: Instance) -> None:
        """Switch a host on in the background, since the caller holds the fake's lock."""
        addresses = [each for each in (instance.private_address, instance.public_address) if each]
        is_on = threading.Event()
        instance.is_ready = is_on.is_set

        def end_from_inside() -> None:
            with self._aws.lock:
                self._aws.account.end_from_inside(instance.id)

        def start() -> None:
            self._start(instance.id, "aws", addresses, instance.user_data.decode(), end_from_inside)
            profile = instance.parameters.get("IamInstanceProfile", {}).get("Name", "")
            self._guests[instance.id].credentials = find_credentials(self._aws.account, profile)
            self.on_aws_host(self.hosts[instance.id])
            is_on.set()

        threading.Thread(target=start, daemon=True).start()

    def _start(
        self, name: str, cloud: str, addresses: Sequence[str], boot: str, end_from_inside: Callable[[], None]
    ) -> None:
        self._guests[name] = guest = Guest(cloud=cloud, id=name)
        self._metadata.guests[addresses[0]] = guest
        self.hosts[name] = host = Host(
            self._folder, name, addresses, boot=boot, shared=self._shared, hidden=self._hidden, on_end=end_from_inside
        )
        host.start()

    def _end(self, name: str) -> None:
        if name in self.hosts:
            self.hosts[name].power_off()
