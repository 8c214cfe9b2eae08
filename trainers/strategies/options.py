"""The options of the strategies, which every run's config inherits. Imports nothing heavy."""

from dataclasses import dataclass, field

from trainers.knobs import knob


@dataclass(frozen=True, kw_only=True)
class AllReduceOptions:
    """`allreduce`: explicit collectives."""

    bucket_mib: float = knob(25.0, "size of a bucket of gradients that is sent as one message")
    algorithm: str = knob("library", "the library's all-reduce, or our own ring of sends", ("library", "ring"))


@dataclass(frozen=True, kw_only=True)
class FsdpOptions:
    """`fsdp` and `hsdp`: sharded parameters."""

    param_dtype: str = knob("float32", "dtype in which parameters are gathered and used", ("float32", "bfloat16"))
    reduce_dtype: str = knob("float32", "dtype in which gradients are summed over ranks", ("float32", "bfloat16"))
    reshard: str = knob("always", "whether to free gathered parameters after the forward pass", ("always", "never"))
    prefetch: int = knob(0, "blocks to gather ahead in forward and backward passes; 0 leaves it to torch")


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """`pipeline`: stages of blocks on different ranks."""

    schedule: str = knob("1f1b", "order of forward and backward passes", ("gpipe", "1f1b", "interleaved"))
    stages_per_rank: int = knob(2, "stages of each rank under `interleaved`")


@dataclass(frozen=True, kw_only=True)
class ParameterServerOptions:
    """`parameter_server`: rank 0 updates the parameters, and the others send it gradients."""

    staleness_max: int = knob(0, "steps a worker may be ahead of the slowest; 0 is synchronous")


@dataclass(frozen=True, kw_only=True)
class DilocoOptions:
    """`diloco`: islands that train independently and synchronize at intervals (arXiv:2311.08105)."""

    every_steps: int = knob(20, "steps between synchronizations; a preemption notice takes effect at the next one")
    learning_rate: float = knob(0.7, "outer learning rate; with 1 and no momentum this is local SGD")
    momentum: float = knob(0.9, "outer Nesterov momentum")


@dataclass(frozen=True, kw_only=True)
class GossipOptions:
    """`gossip`: each rank averages with one other at a time (arXiv:2110.13363)."""

    every_steps: int = knob(1, "steps between exchanges")


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """Options of how ranks share the work. The config of a run inherits them."""

    strategy: str = knob("ddp", "how ranks share the work; parts are joined by `+` (see docs/TRAINERS.md)")
    mesh: str = knob("", "ranks along each axis, such as `2x4`; one may be `*`; empty: nodes x ranks per node")
    offload: str = knob(
        "none", "keep AdamW's moments in CPU memory and update there; slower per step", ("none", "optimizer")
    )
    allreduce: AllReduceOptions = field(default_factory=AllReduceOptions)
    fsdp: FsdpOptions = field(default_factory=FsdpOptions)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    parameter_server: ParameterServerOptions = field(default_factory=ParameterServerOptions)
    diloco: DilocoOptions = field(default_factory=DilocoOptions)
    gossip: GossipOptions = field(default_factory=GossipOptions)


# Their ranks do not take each step together, so they have no common loss scale, and they change parameters outside the
# optimizer as well, which its copies would not follow.
SEPARATE = ("diloco", "gossip", "parameter_server")


def find_problem(options: StrategyOptions) -> str | None:
    """Return the problem in the options, or None."""
    lowest = {
        "--fsdp.prefetch": (options.fsdp.prefetch, 0),
        "--pipeline.stages_per_rank": (options.pipeline.stages_per_rank, 1),
        "--parameter_server.staleness_max": (options.parameter_server.staleness_max, 0),
        "--diloco.every_steps": (options.diloco.every_steps, 1),
        "--gossip.every_steps": (options.gossip.every_steps, 1),
    }
    for flag, (value, least) in lowest.items():
        if value < least:
            return f"`{flag}` must be at least {least}, not {value}"
    if not options.allreduce.bucket_mib > 0:
        return f"`--allreduce.bucket_mib` must be above 0, not {options.allreduce.bucket_mib}"
    if not 0.0 <= options.diloco.momentum < 1.0:
        return f"`--diloco.momentum` must be in [0, 1), not {options.diloco.momentum}"
    not_offloaded = [name for name in options.strategy.split("+") if name in SEPARATE]
    if options.offload != "none" and not_offloaded:
        return f"`--offload {options.offload}` cannot be combined with `--strategy {not_offloaded[0]}`"
    return None
