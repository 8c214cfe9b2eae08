"""Prints a line for each place of checkpoints: its newest step, and a hash of all tensors in it.

`python -m tests.torture.digest PLACE...`
"""

import hashlib
import sys

import torch
import torch.distributed.checkpoint as dcp

from trainers.manifest import find_newest, read_index
from trainers.storage import open_storage
from trainers.verified_reader import VerifiedReader


def describe(url: str) -> str:
    storage = open_storage(url)
    found = find_newest(storage)
    if found is None:
        return "no complete checkpoint"
    name, contents = found
    reader = VerifiedReader(storage, name, contents, read_index(storage, name, contents))
    entries = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert reader.problem is None, reader.problem
    sums = hashlib.sha256()
    for key, tensor in sorted(state.items()):
        sums.update(key.encode())
        sums.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"step {name.step}, {len(state)} tensors, sha256 {sums.hexdigest()[:16]}"


if __name__ == "__main__":
    for place in sys.argv[1:]:
        print(f"{place}\t{describe(place)}")
