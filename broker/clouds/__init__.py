"""Other people's machines. One file a cloud, one line in `CLOUDS`."""

from __future__ import annotations

# name -> "module:maker"; a maker is `broker.clouds.base.MakeCloud`
CLOUDS: dict[str, str] = {
    "local": "broker.clouds.local:make_cloud",
    "aws": "broker.clouds.aws.cloud:make_cloud",
    "gcp": "broker.clouds.gcp.cloud:make_cloud",
}
# name -> module with `inspect` and `write_policy` (`broker.clouds.findings.Inspector`), for `broker check`
CHECKS: dict[str, str] = {
    "aws": "broker.clouds.aws.check",
    "gcp": "broker.clouds.gcp.check",
}
