"""The server: the verbs of `broker.client.wire` over HTTP, for several people and any number of laptops."""
