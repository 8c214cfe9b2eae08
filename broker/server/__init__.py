"""The server: the verbs of `broker.client.wire` over HTTP, for several users and any number of machines."""
