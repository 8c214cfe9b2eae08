"""Find or create the machine of a server: on a cloud, an on-demand cluster with the tags of this installation.

The cluster is launched like every other one: its intent is committed before the create call, `broker status` shows it,
and the collector knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from broker.app.container import Context
from broker.app.verbs.clusters import terminate_clusters
from broker.app.verbs.launching import launch
from broker.errors import UsageError
from broker.frozen import frozen
from broker.hosting.cloud_login import end_login, ensure_login, make_settings, set_identity
from broker.hosting.machines import HostMachine, NodeMachine, SshMachine, ThisMachine, parse_ssh
from broker.hosting.record import HostedServer
from broker.task.loader import load_tasks_text
from broker.types import Cluster, ClusterStatus, Plan

CLUSTER = "broker-server"
CLOUDS = ("aws", "gcp")
TASK = """\
name: {cluster}
resources:
  infra: {infra}
  cpus: 2+
  memory: 4+
  use_spot: false
  ports: [{port}]
"""


@frozen
class MachineFinder:
    """Finds machines by the `infra` of a record. `confirm` raises if the user declines the price of a new one."""

    context: Context
    show: Callable[[Sequence[Plan]], None]
    confirm: Callable[[Sequence[Plan]], None]

    def ensure(self, server: HostedServer) -> HostMachine:
        """Return the machine; create its cluster, or complete one that an earlier call left. Raises BrokerError."""
        if server.cluster is not None and not self._is_up(self._get_cluster(server)):
            set_identity(self.context, server)
            (task,) = load_tasks_text(make_task(server), CLUSTER)
            launch(
                self.context, task=task, cluster=server.cluster, autostop=None,
                hedge=1, retry_until_up=False, is_dryrun=False, show=self.show,
                confirm=lambda plans: self._confirm(server, plans),
                on_stage=lambda text: self.context.note(text),
            )  # fmt: skip
        found = self.find(server)
        assert found is not None, "the launch has recorded the cluster"
        return found

    def find(self, server: HostedServer) -> HostMachine | None:
        """Return the machine; None if its cluster is not up."""
        if server.infra == "local":
            return ThisMachine()
        if server.cluster is None:
            return SshMachine(login=parse_ssh(server.infra, server.ssh_config))
        cluster = self._get_cluster(server)
        if cluster is None or not self._is_up(cluster):
            return None
        return NodeMachine(transport=self.context.transport, node=cluster.nodes[0])

    def end(self, server: HostedServer) -> None:
        """Terminate the cluster, if the server has one."""
        if server.cluster is None or self._get_cluster(server) is None:
            return
        refused = terminate_clusters(
            self.context, names=(server.cluster,), on_down=lambda name: None, is_immediate=True
        )
        if refused:
            raise refused[0]

    def make_settings(self, server: HostedServer) -> Mapping[str, str]:
        """Make the settings files of the machine's cloud for the server."""
        return make_settings(self.context, server)

    def allow(self, server: HostedServer, owner: str) -> None:
        """Let the role of the machine, if it is broker's own, start and end machines of `owner`."""
        ensure_login(self.context, server, owner=owner)

    def end_login(self, server: HostedServer) -> None:
        """Delete the role of the machine, if it is broker's own; already gone is success."""
        end_login(self.context, server)

    def _confirm(self, server: HostedServer, plans: Sequence[Plan]) -> None:
        """Confirm the price, then create the role that the machine needs from its start."""
        self.confirm(plans)
        if server.login.is_own:
            self.context.note(f"creating the role `{server.login.name}`")
            ensure_login(self.context, server, owner=None)

    def _get_cluster(self, server: HostedServer) -> Cluster | None:
        return None if server.cluster is None else self.context.store.clusters.get(server.cluster)

    def _is_up(self, cluster: Cluster | None) -> bool:
        return cluster is not None and cluster.status is ClusterStatus.UP


def make_task(server: HostedServer) -> str:
    """Make the task file of the machine: at least 2 vCPUs and 4 GB, on-demand, with the server's port open."""
    return TASK.format(cluster=server.cluster, infra=server.infra, port=server.port)


def check_infra(infra: str) -> str | None:
    """Return the name of the cluster that a server on `infra` needs; None if its machine already exists.

    Raises UsageError for an unknown or invalid location.
    """
    if infra == "local":
        return None
    if infra.startswith("ssh://"):
        parse_ssh(infra)
        return None
    if infra.split("/")[0] in CLOUDS:
        return CLUSTER
    raise UsageError(
        f"unknown location for a server: `{infra}`", hints=["use `local`, `ssh://[USER@]HOST`, `aws` or `gcp`"]
    )
