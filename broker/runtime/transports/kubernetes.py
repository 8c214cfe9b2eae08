"""Reach a node that is a pod: by `kubectl exec`, which uses the user's login to the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

from broker.clock import Clock
from broker.config import Config
from broker.errors import TransientError
from broker.runtime.transports.machine import MachineTransport, read_site_file
from broker.sites import FILES
from broker.sites.facts import find_facts
from broker.sites.kubectl import make_argv
from broker.sites.kubernetes import CONTAINER_NAME, NODE_ROOT, KubernetesContext, read_contexts
from broker.types import Node
from broker.user_files import UserFile

SCHEME = "k8s://"


def make_transport(config: Config, *, clock: Clock) -> KubernetesTransport:
    """Create the transport, for the registry."""
    return KubernetesTransport(config, clock=clock)


class KubernetesTransport(MachineTransport):
    """Handles are `k8s://CONTEXT/NAMESPACE/POD`, the context quoted as in a URL."""

    def __init__(self, config: Config, *, clock: Clock) -> None:
        super().__init__(clock=clock)
        path, facts = config.home / FILES["kubernetes"], find_facts("kubernetes", config.home)
        self._file = UserFile(path, lambda: _read_contexts(path, facts), beside=[facts])

    def _make_argv(self, node: Node, command: Sequence[str], *, has_terminal: bool = False) -> Sequence[str]:
        name, namespace, pod = node.handle.removeprefix(SCHEME).split("/")
        context = read_site_file(self._file).get(unquote(name))
        if context is None:
            raise TransientError(
                f"context `{unquote(name)}` of node `{node.id}` is not in `kubernetes.yaml`",
                hints=("restore its entry until the node is terminated, or use the BROKER_HOME that launched it",),
            )
        flags = ["-i", *(["-t"] if has_terminal else [])]
        words = ["exec", *flags, "--quiet", f"--namespace={namespace}", pod, f"--container={CONTAINER_NAME}", "--"]
        return make_argv(context, [*words, *command], has_limit=False)

    def _find_folder(self, node: Node) -> str:
        return f"{NODE_ROOT}/{node.id}"


def _read_contexts(path: Path, facts: Path) -> Mapping[str, KubernetesContext]:
    return read_contexts(path, facts) if path.is_file() else {}
