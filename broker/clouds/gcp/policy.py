"""What broker must be allowed to do at Google, and no more: a custom role, and one line of why for each permission."""

from __future__ import annotations

ROLE = "broker"
# permission -> why; `broker check` asks Google which of them the login has
PERMISSIONS: dict[str, str] = {
    "compute.instances.create": "make nodes",
    "compute.instances.delete": "end nodes",
    "compute.instances.get": "look at one node",
    "compute.instances.list": "find all nodes, by label",
    "compute.instances.setLabels": "tag nodes with their owner",
    "compute.instances.setMetadata": "give nodes their first-start script",
    "compute.instances.setTags": "tie nodes to their firewall rules",
    "compute.instances.start": "`broker start`",
    "compute.instances.stop": "`broker stop`",
    "compute.disks.create": "a node's boot disk",
    "compute.disks.setLabels": "tag disks with their owner",
    "compute.images.getFromFamily": "find the newest image of this project's own families",
    "compute.images.useReadOnly": "start from this project's own images",
    "compute.networks.get": "see that the network is there",
    "compute.networks.updatePolicy": "put firewall rules into the network",
    "compute.subnetworks.get": "find the network of a subnetwork named in the settings",
    "compute.subnetworks.use": "put nodes into the network",
    "compute.subnetworks.useExternalIp": "reach nodes by ssh",
    "compute.firewalls.create": "let ssh in from here only",
    "compute.firewalls.delete": "close what was opened",
    "compute.firewalls.list": "find rules that were left over",
    "compute.firewalls.update": "let ssh in from here after this machine's address has changed",
    "compute.projects.get": "ask for the quota of GPUs in all regions",
    "compute.regions.get": "ask for quotas before trying",
    "compute.regions.list": "`broker check`: GPU quotas of every region",
    "compute.machineTypes.list": "find the zones that have a machine",
    "compute.zoneOperations.get": "wait for Google's verdict on a create",
    "compute.globalOperations.get": "wait for a firewall rule",
    "compute.globalOperations.list": "tell a preempted node from a deleted one",
    "serviceusage.services.use": "count a user's calls against this project's own rate limits",
}


def write_role(project: str = "") -> str:
    """YAML for `gcloud iam roles create broker --project=PROJECT --file=FILE`."""
    width = max(map(len, PERMISSIONS))
    lines = [f"- {name:<{width}}  # {why}" for name, why in PERMISSIONS.items()]
    head = [
        f"# gcloud iam roles create {ROLE} --project={project or 'PROJECT'} --file=THIS_FILE",
        "title: broker",
        "description: What the intercloud broker needs to make, find and end its nodes",
        "stage: GA",
        "includedPermissions:",
    ]
    return "\n".join([*head, *lines]) + "\n"
