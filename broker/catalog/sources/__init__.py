"""Price sources. One file per source, one line in `SOURCES`."""

from __future__ import annotations

# name -> "module:class", imported on first use. If two sources cover a cloud, the first is queried first.
SOURCES: dict[str, str] = {
    "aws": "broker.catalog.sources.aws:AwsSource",
    "gcp": "broker.catalog.sources.gcp:GcpSource",
    "azure": "broker.catalog.sources.azure:AzureSource",
    "skypilot": "broker.catalog.sources.skypilot:SkyPilotSource",
}
# Asked in the background. Azure's own list is 1,500 pages, so SkyPilot's file of Azure takes its place there.
IN_BACKGROUND = ("aws", "gcp", "skypilot")
# SkyPilot's file of AWS has ids of zones (`use1-az1`) in place of an account's letters, which a launch requires; it is
# used on request only.
ON_REQUEST = frozenset({("skypilot", "aws")})
