"""Runs in SkyPilot's own environment: its optimizer on every task of a file, all clouds taken as enabled.

    python sky_side.py CLOUDS TASKS.json RESULTS.json      (HOME holds .sky/catalogs)

A result is {"usd", "what", "seconds"} or {"error", "seconds"}; before them stand the seconds of the import.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> None:
    clouds, tasks, results = sys.argv[1].split(","), Path(sys.argv[2]), Path(sys.argv[3])
    start = time.perf_counter()
    import sky
    from sky import check
    from sky.utils import registry

    enabled = [registry.CLOUD_REGISTRY.from_str(name) for name in clouds]
    check.get_cached_enabled_clouds_or_refresh = lambda *_, **__: enabled
    for cloud in enabled:
        type(cloud).check_credentials = classmethod(lambda *_, **__: (True, ""))
        type(cloud).get_user_identities = classmethod(lambda *_: None)
    imported = time.perf_counter() - start

    # AWS numbers its zones differently in every account, and asks the account; the catalog's own names are used.
    from sky.catalog import aws_catalog

    aws_catalog._fetch_and_apply_az_mapping = lambda frame: frame
    found = [plan(sky, config) for config in json.loads(tasks.read_text())]
    results.write_text(json.dumps([imported, *found]))


def plan(sky: object, config: dict) -> dict:
    start = time.perf_counter()
    try:
        task = sky.Task.from_yaml_config(config)
        dag = sky.Dag()
        dag.add(task)
        sky.optimizer.Optimizer.optimize(dag, quiet=True)
        best = task.best_resources
        found = {"usd": best.get_cost(3600) * task.num_nodes, "what": str(best)}
    except Exception as error:  # any refusal is its answer
        found = {"error": f"{type(error).__name__}: {error}"[:300]}
    return {**found, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    main()
