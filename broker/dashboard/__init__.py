"""The dashboard and `broker top`: one read model of the store, shown as pages and in a terminal."""
