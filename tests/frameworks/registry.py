"""What `make test-frameworks` runs: a template, the process to kill, and what has to survive."""

from __future__ import annotations

from dataclasses import dataclass, field

PROGRAM = r"python\S* (-u )?-m trainers\.frameworks\."


@dataclass(frozen=True, kw_only=True)
class Framework:
    """`distribution` names the version that is reported. `victim` matches the command line of rank 1's process.

    `is_elastic`: the loss of a worker is survived within one attempt, so no process of the first node starts again.
    `is_exact`: a resumed run has the weights of an undisturbed one, bit for bit.
    """

    distribution: str
    victim: str = PROGRAM
    is_elastic: bool = False
    is_exact: bool = True
    envs: dict[str, str] = field(default_factory=dict)


FRAMEWORKS = {
    "torchrun": Framework(distribution="torch"),
    "jax": Framework(distribution="jax"),
    "deepspeed": Framework(distribution="deepspeed"),
    "accelerate": Framework(distribution="accelerate"),
    "hf-trainer": Framework(distribution="transformers"),
    "peft": Framework(distribution="peft"),
    "lightning": Framework(distribution="lightning"),
    "tensorflow": Framework(distribution="tensorflow-cpu"),
    "keras": Framework(distribution="tf_keras"),
    "mpi": Framework(distribution="mpi4py", victim=r"python\S* (-u )?-m trainers\.frameworks\.mpi_numpy"),
    "tensorflow-ps": Framework(
        distribution="tensorflow-cpu", victim=r"^\S*" + PROGRAM, is_elastic=True, envs={"STEP_S": "0.25"}
    ),
    "dask": Framework(
        distribution="distributed", victim=r"^\S*python\S* \S*dask worker", is_elastic=True, envs={"STEP_S": "0.25"}
    ),
    # Without SPT_NOENV Ray's process titles overwrite the environment, by which a process of a node is found.
    "ray-train": Framework(distribution="ray", victim=r"^ray::.*TrainWorker", is_elastic=True, envs={"SPT_NOENV": "1"}),
}
