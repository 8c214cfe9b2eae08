"""Reach a node that is a pod: by `kubectl exec`, which uses the user's login to the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from urllib.parse import unquote

from broker.clock import Clock
from broker.config import Config
from broker.errors import StateError
from broker.runtime.transports.machine import MachineTransport
from broker.sites import find_file
from broker.sites.facts import find_facts
from broker.sites.kubectl import make_argv
from broker.sites.kubernetes import CONTAINER_NAME, NODE_ROOT, KubernetesContext, read_contexts
from broker.types import Node

SCHEME = "k8s://"


def make_transport(config: Config, *, clock: Clock) -> KubernetesTransport:
    """Create the transport, for the registry."""
    return KubernetesTransport(config, clock=clock)


class KubernetesTransport(MachineTransport):
    """Handles are `k8s://CONTEXT/NAMESPACE/POD`, the context quoted as in a URL."""

    def __init__(self, config: Config, *, clock: Clock) -> None:
        super().__init__(clock=clock)
        self._config = config

    def _make_argv(self, node: Node, command: Sequence[str], *, has_terminal: bool = False) -> Sequence[str]:
        name, namespace, pod = node.handle.removeprefix(SCHEME).split("/")
        context = self._contexts.get(unquote(name))
        if context is None:
            raise StateError(
                f"context `{unquote(name)}` of node `{node.id}` is not in `kubernetes.yaml`",
                hints=("restore its entry until the node is terminated, or use the BROKER_HOME that launched it",),
            )
        flags = ["-i", *(["-t"] if has_terminal else [])]
        words = ["exec", *flags, "--quiet", f"--namespace={namespace}", pod, f"--container={CONTAINER_NAME}", "--"]
        return make_argv(context, [*words, *command], has_limit=False)

    def _find_folder(self, node: Node) -> str:
        return f"{NODE_ROOT}/{node.id}"

    @cached_property
    def _contexts(self) -> Mapping[str, KubernetesContext]:
        path = find_file("kubernetes", self._config.home)
        return read_contexts(path, find_facts("kubernetes", self._config.home)) if path else {}
