"""Network speed between nodes of an instance type. The price book has no such column, so the table is here."""

from __future__ import annotations

from functools import lru_cache

# (cloud, prefix of the instance type) -> Gbit/s of one node; the longest matching prefix applies. Sources: the clouds'
# own pages on their accelerator machines, read as of 2025 (AWS "Accelerated computing instances", Google "GPU machine
# types", Azure "GPU accelerated sizes", Oracle "GPU shapes", Nebius "GPU clusters"). If a page gives several figures,
# this is the network that the accelerators use.
GBITS: dict[tuple[str, str], float] = {
    ("aws", "p6-b300"): 6400, ("aws", "p6-b200"): 3200, ("aws", "p5"): 3200, ("aws", "p5.4xlarge"): 100,
    ("aws", "p4d"): 400, ("aws", "p3dn"): 100, ("aws", "p3.16xlarge"): 25, ("aws", "p3"): 10,
    ("aws", "g6e.48xlarge"): 400, ("aws", "g6e.24xlarge"): 200, ("aws", "g6e.12xlarge"): 100, ("aws", "g6e"): 20,
    ("aws", "g6.48xlarge"): 100, ("aws", "g6.24xlarge"): 50, ("aws", "g6.12xlarge"): 40, ("aws", "g6"): 10,
    ("aws", "g5.48xlarge"): 100, ("aws", "g5.24xlarge"): 50, ("aws", "g5.12xlarge"): 40, ("aws", "g5"): 10,
    ("aws", "g4dn.metal"): 100, ("aws", "g4dn.12xlarge"): 50, ("aws", "g4dn"): 20,
    ("aws", "trn1.32xlarge"): 800, ("aws", "trn1n"): 1600, ("aws", "trn2"): 3200, ("aws", "dl1"): 400,
    ("gcp", "a4-highgpu-8g"): 3200, ("gcp", "a3-ultragpu-8g"): 3200, ("gcp", "a3-megagpu-8g"): 1600,
    ("gcp", "a3-highgpu-8g"): 800, ("gcp", "a3-highgpu"): 50, ("gcp", "a2-highgpu-8g"): 100,
    ("gcp", "a2-megagpu-16g"): 100, ("gcp", "a2-ultragpu-8g"): 100, ("gcp", "a2-"): 32, ("gcp", "g2-standard-96"): 100,
    ("gcp", "g2-standard-48"): 50, ("gcp", "g2-"): 16,
    ("azure", "Standard_ND96isr_H100_v5"): 3200, ("azure", "Standard_ND96isr_H200_v5"): 3200,
    ("azure", "Standard_ND96is"): 80, ("azure", "Standard_ND96asr_v4"): 1600, ("azure", "Standard_ND96amsr"): 1600,
    ("azure", "Standard_ND96isr_MI300X_v5"): 3200, ("azure", "Standard_ND40rs_v2"): 100,
    ("azure", "Standard_NC80adis_H100_v5"): 80, ("azure", "Standard_NC96ads_A100_v4"): 80,
    ("azure", "Standard_NC40ads_H100_v5"): 40, ("azure", "Standard_NC"): 20,
    ("oci", "BM.GPU4.8"): 1600, ("oci", "BM.GPU.A100-v2.8"): 1600, ("oci", "BM.GPU.H100.8"): 3200,
    ("oci", "BM.GPU.H200.8"): 3200, ("oci", "BM.GPU.B200.8"): 3200, ("oci", "BM.GPU.MI300X.8"): 3200,
    ("nebius", "gpu-h100-sxm_8gpu"): 3200, ("nebius", "gpu-h200-sxm_8gpu"): 3200, ("nebius", "gpu-b200-sxm_8gpu"): 3200,
}  # fmt: skip
DEFAULT_GBITS = 25.0  # for types not listed: Ethernet of a cloud's larger machines

_BY_CLOUD: dict[str, list[tuple[str, float]]] = {}
for (_cloud, _beginning), _gbits in GBITS.items():
    _BY_CLOUD.setdefault(_cloud, []).append((_beginning, _gbits))
for _lines in _BY_CLOUD.values():
    _lines.sort(key=lambda line: -len(line[0]))


@lru_cache(maxsize=4096)
def find_network_gbs(cloud: str, instance_type: str) -> float:
    """Return GB/s in one direction between two such nodes, as stated by the cloud."""
    for beginning, gbits in _BY_CLOUD.get(cloud, ()):
        if instance_type.startswith(beginning):
            return gbits / 8
    return DEFAULT_GBITS / 8
