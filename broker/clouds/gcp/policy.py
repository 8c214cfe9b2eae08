"""The minimal permissions at Google: a custom role, and one line of reason for each permission."""

from __future__ import annotations

ROLE = "broker"
# permission -> reason; `broker check` asks Google which of them the login has
PERMISSIONS: dict[str, str] = {
    "compute.instances.create": "make nodes",
    "compute.instances.delete": "end nodes",
    "compute.instances.get": "look at one node",
    "compute.instances.list": "find all nodes, by label",
    "compute.instances.setLabels": "tag nodes with their owner",
    "compute.instances.setMetadata": "give nodes their first-start script",
    "compute.instances.setTags": "bind nodes to their firewall rules",
    "compute.instances.start": "`broker start`",
    "compute.instances.stop": "`broker stop`",
    "compute.disks.create": "a node's boot disk",
    "compute.disks.setLabels": "tag disks with their owner",
    "compute.images.getFromFamily": "find the newest image of this project's own families",
    "compute.images.useReadOnly": "boot from this project's own images",
    "compute.networks.get": "check that the network exists",
    "compute.networks.updatePolicy": "create firewall rules in the network",
    "compute.subnetworks.get": "find the network of a subnetwork named in the settings",
    "compute.subnetworks.use": "put nodes into the network",
    "compute.subnetworks.useExternalIp": "reach nodes by ssh",
    "compute.firewalls.create": "allow ssh from this machine only",
    "compute.firewalls.delete": "delete firewall rules",
    "compute.firewalls.list": "find orphaned firewall rules",
    "compute.firewalls.update": "allow ssh after this machine's address has changed",
    "compute.projects.get": "check the GPU quota of all regions",
    "compute.regions.get": "check quotas before a create call",
    "compute.regions.list": "`broker check`: GPU quotas of every region",
    "compute.machineTypes.list": "find the zones that offer a machine type",
    "compute.zoneOperations.get": "wait for the result of a create call",
    "compute.globalOperations.get": "wait for a firewall rule",
    "compute.globalOperations.list": "distinguish a preempted node from a deleted one",
    "serviceusage.services.use": "count a user's calls against this project's own rate limits",
}


def write_role(project: str = "") -> str:
    """Return YAML for `gcloud iam roles create broker --project=PROJECT --file=FILE`."""
    width = max(map(len, PERMISSIONS))
    lines = [f"- {name:<{width}}  # {why}" for name, why in PERMISSIONS.items()]
    head = [
        f"# gcloud iam roles create {ROLE} --project={project or 'PROJECT'} --file=THIS_FILE",
        "title: broker",
        "description: Permissions that the intercloud broker requires to create, find and delete its nodes",
        "stage: GA",
        "includedPermissions:",
    ]
    return "\n".join([*head, *lines]) + "\n"
