"""Runs in SkyPilot's own environment: the balancer of SkyServe, which asks a controller for its replicas.

    python sky_balancer.py CONTROLLER_URL PORT

`bench_balancer.py` answers in the controller's place.
"""

from __future__ import annotations

import sys


def main() -> None:
    from sky.serve.load_balancer import run_load_balancer

    run_load_balancer(sys.argv[1], int(sys.argv[2]), "least_load")


if __name__ == "__main__":
    main()
