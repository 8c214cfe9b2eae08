"""The client of a server: the verbs that it offers, their encoding, and the session that calls them."""
