"""Run kubectl: the user's program handles every kind of kubeconfig and login plugin (docs/decisions/0290)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from broker.errors import StateError
from broker.sites.kubernetes import KubernetesContext
from broker.sites.openssh import Completed, call

CALL_S = 60.0
REQUEST_S = 30  # of one request; the call has more time, for a login plugin


def find_kubectl() -> str:
    """Return the path of kubectl. Raises StateError if it is not installed."""
    path = shutil.which("kubectl")
    if path is None:
        raise StateError(
            "`kubectl` is not installed on this machine, or not in a folder of PATH",
            hints=("install kubectl 1.31 or later: https://kubernetes.io/docs/tasks/tools/",),
        )
    return path


def make_argv(context: KubernetesContext, words: Sequence[str], *, has_limit: bool = True) -> list[str]:
    """Return the kubectl command with this entry's kubeconfig and context, by default the current context."""
    argv = [find_kubectl(), *([f"--context={context.context}"] if context.context else [])]
    argv += [f"--kubeconfig={context.kubeconfig}"] if context.kubeconfig else []
    argv += [f"--request-timeout={REQUEST_S}s"] if has_limit else []
    return [*argv, *words]


async def run_kubectl(context: KubernetesContext, words: Sequence[str], stdin: bytes = b"") -> Completed:
    """Run kubectl to its end. Raises StateError if it is missing, TransientError if it does not end within CALL_S."""
    what = f"the cluster of context `{context.name}`"
    return await call(make_argv(context, words), stdin=stdin, timeout_s=CALL_S, what=what)
