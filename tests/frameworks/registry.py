"""The runs of `make test-frameworks`: a template, the process to kill, and what has to survive."""

from __future__ import annotations

from dataclasses import dataclass, field

PROGRAM = r"python\S* (-u )?-m trainers\.frameworks\."


@dataclass(frozen=True, kw_only=True)
class Framework:
    """`distribution` names the version that is reported. `victim` matches the command line of rank 1's process.

    `service` matches the process by which a replaced node takes part, if victims also come and go by themselves.
    `is_elastic`: the loss of a worker is survived within one attempt, so no process of the first node starts again.
    `is_exact`: a resumed run has the weights of an undisturbed one, bit for bit.
    `shrinks`: its progress lines have the number of `ranks`, which falls with a lost node and rises with the new one.
    `loses_first`: the first node is preempted as well, which restarts the job.
    `part_count`: parts of the work that run at a time, each with checkpoints of its own.
    """

    distribution: str
    victim: str = PROGRAM
    service: str = ""
    is_elastic: bool = False
    is_exact: bool = True
    shrinks: bool = False
    loses_first: bool = False
    part_count: int = 1
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
    "torchrun-elastic": Framework(
        distribution="torch", is_elastic=True, shrinks=True, loses_first=True, envs={"STEP_S": "0.2"}
    ),
    "torchft": Framework(
        distribution="torchft",
        victim=r"^\S*" + PROGRAM,
        is_elastic=True,
        shrinks=True,
        loses_first=True,
        envs={"STEP_S": "0.2"},
    ),
    "ray-tune": Framework(
        distribution="ray",
        victim=r"^ray::ImplicitFunc",
        service=r"^\S*/raylet ",
        is_elastic=True,
        loses_first=True,
        part_count=2,
        envs={"STEP_S": "0.5", "SPT_NOENV": "1"},
    ),
    "spark": Framework(
        distribution="pyspark",
        victim=r"^\S*java .*worker\.Worker",
        is_elastic=True,
        loses_first=True,
        envs={"STEP_S": "0.5"},
    ),
}


@dataclass(frozen=True, kw_only=True)
class GpuTemplate:
    """A template that needs GPUs: its program runs on CPUs only in `tests.frameworks.rehearsals`, never in a job."""

    distribution: str
    program: str
    envs: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


GPU_TEMPLATES = {
    "megatron_core": GpuTemplate(
        distribution="megatron-core", program="megatron_gpt", envs={"TENSOR": "2", "PIPELINE": "2"}
    ),
    "torchtitan": GpuTemplate(
        distribution="torchtitan", program="torchtitan_llama", flags=("--parallelism.tensor_parallel_degree", "2")
    ),
}
