"""The verbs of the command line, each a function of a context and plain values, so that a server can run it.

A verb takes values and callbacks and returns a value. `Session.call` runs it here, or on the server that this user is
logged in to; `broker/client/wire.py` lists the verbs that a server offers.
"""
