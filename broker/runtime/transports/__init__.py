"""How to reach the nodes of each cloud. One file a way, one line in `TRANSPORTS`."""

from __future__ import annotations

# cloud name -> "module:class", imported on first use
TRANSPORTS: dict[str, str] = {
    "local": "broker.runtime.transports.local:LocalTransport",
}
