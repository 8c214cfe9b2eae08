"""Register the transports to nodes: one file per transport, one line in `TRANSPORTS`."""

from __future__ import annotations

# scheme of a node's handle -> "module:maker", called with (config, clock=) on first use
TRANSPORTS: dict[str, str] = {
    "local": "broker.runtime.transports.local:make_transport",
    "ssh": "broker.runtime.transports.ssh:make_transport",
    "pool": "broker.runtime.transports.pool:make_transport",
    "slurm": "broker.runtime.transports.slurm:make_transport",
    "k8s": "broker.runtime.transports.kubernetes:make_transport",
    "sky": "broker.runtime.transports.sky:make_transport",
}
