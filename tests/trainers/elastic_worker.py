"""A worker of an elastic run that meets the others and does nothing: `python -m tests.trainers.elastic_worker`.

Without torch a restart takes a tenth of a second, so that many losses fit into a test.
"""

import os
import signal
import time

from trainers.elastic import ElasticMember


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    member = ElasticMember(os.environ["BROKER_ELASTIC_AT"])
    world = member.world
    print(f"node {os.environ['SKYPILOT_NODE_RANK']} generation {world.generation} ranks {world.world_size}", flush=True)
    while not member.is_change_asked:  # by a newcomer
        time.sleep(0.05)
    # The others are asked too, so all of them vote.
    if member.vote(is_leaving=False) == "again":
        member.restart()


if __name__ == "__main__":
    main()
