"""The script that a cloud node runs at its first boot, with the keys that are made before the node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.clouds.base import ProvidesSshHosts
from broker.runtime.bootstrap import make_boot
from broker.runtime.keys import HOST, LOGIN, Keys

if TYPE_CHECKING:
    from broker.app.container import Context
    from broker.types import NodeRequest


def write_boot(context: Context, request: NodeRequest) -> str:
    """Return the script; empty for nodes that need none, such as local ones. Delete the keys of nodes that are gone."""
    cloud = context.clouds[request.placement.offer.cloud]
    if not isinstance(cloud, ProvidesSshHosts):
        return ""
    keys, store = Keys(context.config.keys), context.store
    # Read intents before clusters: an intent that closes in the meantime has recorded its cluster in the same commit.
    live = [(intent.request.cluster, intent.request.token) for intent in store.intents.list_open()]
    for cluster in store.clusters.list():
        live += [(cluster.name, token) for token in store.intents.list_tokens(cluster.name)]
    if context.provisioner.is_adopted():  # else unrecorded nodes may still need these keys
        keys.forget(but=live)
    pair = keys.ensure(request.cluster, request.token)
    login, host = pair.read(LOGIN).public, pair.read(HOST)
    return make_boot(cloud=cloud.name, login=login, host=host, user=cloud.user)
