"""The dashboard and `broker top`: one read model of the store, drawn as pages and in a terminal."""
