"""Batch inference: split files of items into shards, on which any number of managed jobs work."""
