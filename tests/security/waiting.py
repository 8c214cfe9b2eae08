"""The worker of a run that only waits: with `--store` its ranks meet at torch's store first."""

import os
import sys
import time
from pathlib import Path


def main() -> None:
    if "--store" in sys.argv:
        import torch.distributed as dist

        host = os.environ["SKYPILOT_NODE_IPS"].split()[0]
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{host}:{os.environ['BROKER_MASTER_PORT']}",
            rank=int(os.environ["SKYPILOT_NODE_RANK"]),
            world_size=int(os.environ["SKYPILOT_NUM_NODES"]),
        )
    Path(os.environ["WAITING"], f"waits-{os.environ['SKYPILOT_NODE_RANK']}").touch()
    while not Path(os.environ["WAITING"], "enough").exists():
        time.sleep(0.05)


if __name__ == "__main__":
    main()
