"""Price sources. One file per source, one line in `SOURCES`."""

from __future__ import annotations

# name -> "module:class", imported on first use. If two sources cover a cloud, the first is queried first.
SOURCES: dict[str, str] = {
    "aws": "broker.catalog.sources.aws:AwsSource",
    "gcp": "broker.catalog.sources.gcp:GcpSource",
    "azure": "broker.catalog.sources.azure:AzureSource",
    "skypilot": "broker.catalog.sources.skypilot:SkyPilotSource",
}
# Used by background updates. Azure's own list has 1,500 pages, so SkyPilot's Azure file replaces it there.
IN_BACKGROUND = ("aws", "gcp", "skypilot")
# SkyPilot's AWS file has zone IDs (`use1-az1`) instead of the account-specific names that a launch requires, so it is
# used on request only.
ON_REQUEST = frozenset({("skypilot", "aws")})
