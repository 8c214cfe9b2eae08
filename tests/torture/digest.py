"""Prints a line for each place of checkpoints: its newest step, and a hash of all tensors in it.

`python -m tests.torture.digest PLACE...`
"""

import hashlib
import sys

import torch
import torch.distributed.checkpoint as dcp

from trainers.checkpoint import find_newest
from trainers.storage import open_storage


def describe(url: str) -> str:
    storage = open_storage(url)
    found = find_newest(storage)
    if found is None:
        return "no complete checkpoint"
    reader = storage.open_reader(str(found[0]))
    entries = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    sums = hashlib.sha256()
    for key, tensor in sorted(state.items()):
        sums.update(key.encode())
        sums.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"step {found[0].step}, {len(state)} tensors, sha256 {sums.hexdigest()[:16]}"


if __name__ == "__main__":
    for place in sys.argv[1:]:
        print(f"{place}\t{describe(place)}")
