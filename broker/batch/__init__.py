"""Batch inference: a file of items split into shards, which any number of managed jobs work on."""
