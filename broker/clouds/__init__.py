"""Other people's machines. One file a cloud, one line in `CLOUDS`."""

from __future__ import annotations

# name -> "module:maker"; a maker is `broker.clouds.base.MakeCloud`
CLOUDS: dict[str, str] = {
    "local": "broker.clouds.local:make_cloud",
    "aws": "broker.clouds.aws.cloud:make_cloud",
    "gcp": "broker.clouds.gcp.cloud:make_cloud",
}
