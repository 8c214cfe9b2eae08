"""The client of a server: the verbs it offers, their encoding, and the session that calls them."""
