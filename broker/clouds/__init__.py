"""Other people's machines. One file a cloud, one line in `CLOUDS`."""

from __future__ import annotations

# name -> "module:class", imported on first use
CLOUDS: dict[str, str] = {
    "local": "broker.clouds.local:LocalCloud",
}
