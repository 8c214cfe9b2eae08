"""Where prices come from. One file a source, one line in `SOURCES`."""

from __future__ import annotations

# name -> "module:class", imported on first use; of two that know a cloud, the first is asked first
SOURCES: dict[str, str] = {
    "aws": "broker.catalog.sources.aws:AwsSource",
    "gcp": "broker.catalog.sources.gcp:GcpSource",
    "azure": "broker.catalog.sources.azure:AzureSource",
    "skypilot": "broker.catalog.sources.skypilot:SkyPilotSource",
}
