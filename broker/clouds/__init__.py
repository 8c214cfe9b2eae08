"""Cloud adapters: one file per cloud, one line in `CLOUDS`."""

from __future__ import annotations

# name -> "module:maker"; a maker is `broker.clouds.base.MakeCloud`
CLOUDS: dict[str, str] = {
    "local": "broker.clouds.local:make_cloud",
    "aws": "broker.clouds.aws.cloud:make_cloud",
    "gcp": "broker.clouds.sky.tpus:make_cloud",
    "azure": "broker.clouds.sky.makers:make_azure",
    "cudo": "broker.clouds.sky.makers:make_cudo",
    "do": "broker.clouds.sky.makers:make_do",
    "fluidstack": "broker.clouds.sky.makers:make_fluidstack",
    "hyperbolic": "broker.clouds.sky.makers:make_hyperbolic",
    "ibm": "broker.clouds.sky.makers:make_ibm",
    "kubernetes": "broker.clouds.own:make_kubernetes",
    "lambda": "broker.clouds.sky.makers:make_lambda",
    "mithril": "broker.clouds.sky.makers:make_mithril",
    "nebius": "broker.clouds.sky.makers:make_nebius",
    "oci": "broker.clouds.sky.makers:make_oci",
    "paperspace": "broker.clouds.sky.makers:make_paperspace",
    "primeintellect": "broker.clouds.sky.makers:make_primeintellect",
    "runpod": "broker.clouds.sky.makers:make_runpod",
    "scp": "broker.clouds.sky.makers:make_scp",
    "seeweb": "broker.clouds.sky.makers:make_seeweb",
    "shadeform": "broker.clouds.sky.makers:make_shadeform",
    "slurm": "broker.clouds.own:make_slurm",
    "ssh": "broker.clouds.own:make_ssh",
    "vast": "broker.clouds.sky.makers:make_vast",
    "verda": "broker.clouds.sky.makers:make_verda",
    "vsphere": "broker.clouds.sky.makers:make_vsphere",
    "yotta": "broker.clouds.sky.makers:make_yotta",
}
# Machines there cannot terminate themselves: SkyPilot 0.14.1 has no autodown for them (`sky/clouds/*.py`, AUTODOWN).
# Only broker terminates them, so no lease bounds their cost while it is unavailable.
WITHOUT_SELF_TERMINATION = ("hyperbolic", "primeintellect", "verda", "yotta")
# name -> `broker.clouds.findings.Inspector`, for `broker check`: a module, or "module:class" instantiated with the name
CHECKS: dict[str, str] = {
    "aws": "broker.clouds.aws.check",
    "gcp": "broker.clouds.gcp.check",
    "azure": "broker.clouds.sky.check:SkyInspector",
    "cudo": "broker.clouds.sky.check:SkyInspector",
    "do": "broker.clouds.sky.check:SkyInspector",
    "fluidstack": "broker.clouds.sky.check:SkyInspector",
    "hyperbolic": "broker.clouds.sky.check:SkyInspector",
    "ibm": "broker.clouds.sky.check:SkyInspector",
    "kubernetes": "broker.clouds.own:find_inspector",
    "lambda": "broker.clouds.sky.check:SkyInspector",
    "mithril": "broker.clouds.sky.check:SkyInspector",
    "nebius": "broker.clouds.sky.check:SkyInspector",
    "oci": "broker.clouds.sky.check:SkyInspector",
    "paperspace": "broker.clouds.sky.check:SkyInspector",
    "primeintellect": "broker.clouds.sky.check:SkyInspector",
    "runpod": "broker.clouds.sky.check:SkyInspector",
    "scp": "broker.clouds.sky.check:SkyInspector",
    "seeweb": "broker.clouds.sky.check:SkyInspector",
    "shadeform": "broker.clouds.sky.check:SkyInspector",
    "slurm": "broker.clouds.own:find_inspector",
    "ssh": "broker.clouds.own:find_inspector",
    "vast": "broker.clouds.sky.check:SkyInspector",
    "verda": "broker.clouds.sky.check:SkyInspector",
    "vsphere": "broker.clouds.sky.check:SkyInspector",
    "yotta": "broker.clouds.sky.check:SkyInspector",
}
# name -> "module:function" (`broker.clouds.base.ExplainMissingImage`), for plans on clouds without a public image for
# some machine types
MISSING_IMAGES: dict[str, str] = {"aws": "broker.clouds.aws.image_rules:explain_missing_image"}
