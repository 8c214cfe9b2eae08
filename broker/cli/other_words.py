"""Commands and flags of SkyPilot, Slurm and kubectl that broker calls differently: the hint for those who type them."""

from __future__ import annotations

COMMANDS = {
    "api": "use `broker server`, `broker login` and `broker logout`",
    "apply": "use `broker launch` or `broker jobs launch`",
    "cost-report": "use `broker cost`",
    "delete": "use `broker down`",
    "get": "use `broker status`",
    "ps": "use `broker status`",
    "run": "use `broker launch`, or `broker jobs launch` for a managed job",
    "sbatch": "use `broker jobs import`, then `broker jobs launch`",
    "show-gpus": "use `broker gpus`",
    "spot": "use `broker jobs`",
    "squeue": "use `broker status` or `broker jobs queue`",
    "storage": "write buckets to `file_mounts` in the task; broker never deletes a bucket",
    "submit": "use `broker jobs launch`",
    "up": "use `broker launch`, or `broker serve up` for a service",
    "volumes": "volumes are not supported; write buckets to `file_mounts` in the task",
}
_IN_TASK = "write `{}` under `resources` in the task"
FLAGS = {
    "--async": "use `-d`",
    "--cloud": "use `--infra CLOUD`",
    "--detach-setup": "use `-d`",
    "--disk-size": _IN_TASK.format("disk_size"),
    "--disk-tier": _IN_TASK.format("disk_tier"),
    "--image-id": _IN_TASK.format("image_id"),
    "--job-recovery": _IN_TASK.format("job_recovery"),
    "--no-setup": "use `broker exec`, which skips `setup`",
    "--ports": _IN_TASK.format("ports"),
    "--region": "use `--infra CLOUD/REGION`",
    "--zone": "use `--infra CLOUD/REGION/ZONE`",
}
