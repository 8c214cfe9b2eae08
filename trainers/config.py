"""The options of a training run: a tree of frozen dataclasses, in which each field is a flag with its help text.

This module imports nothing heavy, so that `--help` and a mistyped flag answer at once.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainers.flags import iterate_knobs, parse_flags, to_arguments
from trainers.interval import AUTOMATIC
from trainers.knobs import knob
from trainers.launch import parse_elastic
from trainers.presets import PRESETS
from trainers.strategies.options import SEPARATE, StrategyOptions

# Hidden widths are rounded up to a multiple of this, which suits the matrix units of every GPU.
WIDTH_MULTIPLE = 64
# Strategies under which each rank needs a sample in each step.
EVERY_RANK_READS = ("ddp", "allreduce", "zero1", "zero2", "fsdp", "hsdp", "diloco", "gossip")
_NUMBER = r"\d+(?:\.\d+)?"
ROPE_SCALING = rf"linear:{_NUMBER}|llama3:{_NUMBER}(?:,{_NUMBER}){{3}}"

__all__ = ["Config", "find_problem", "iterate_knobs", "parse_config", "to_arguments"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the network."""

    kind: str = knob("gpt", "GPT-2's blocks, or Llama's (also Mistral's and Qwen's)", ("gpt", "llama"))
    depth: int = knob(4, "transformer blocks")
    width: int = knob(128, "size of the residual stream, a multiple of the heads")
    heads: int = knob(4, "attention heads")
    key_value_heads: int = knob(0, "key and value heads, each shared by several query heads (llama); 0: all heads")
    hidden_width: int = knob(0, "width inside the perceptron; 0: 4 x width, for llama 8/3 x width")
    context: int = knob(128, "context length in tokens")
    bidirectional: bool = knob(False, "let tokens attend to later ones too, as an encoder; needs --data.mask_share")
    vocabulary: int = knob(0, "vocabulary size; 0: that of the data")
    vocabulary_multiple: int = knob(128, "round the vocabulary up to a multiple of this, for GPUs; 1 does not round")
    dropout: float = knob(0.0, "share of activations dropped while training (gpt)")
    tie_embeddings: bool = knob(False, "use the token embedding as the last layer too")
    rope_theta: float = knob(10000.0, "longest wave of the rotary position embedding (llama)")
    rope_scaling: str = knob("", "`linear:FACTOR`, or `llama3:FACTOR,LOW,HIGH,CONTEXT` as in Llama 3.1 (llama)")
    head_width: int = knob(0, "width of an attention head (llama); 0: width / heads")
    attention_bias: str = knob(
        "none", "biases of attention (llama): none, of queries, keys and values (Qwen2), or all", ("none", "qkv", "all")
    )
    query_key_norm: bool = knob(False, "normalise queries and keys (llama), as Qwen3 does")
    activation: str = knob("gelu", "gelu, or its tanh approximation, as in GPT-2 (gpt)", ("gelu", "gelu_tanh"))
    norm_epsilon: float = knob(1e-5, "added to variances in norms")
    positions: int = knob(0, "positions that can be embedded (gpt); 0: the context")
    experts: int = knob(0, "perceptrons of a block, of which a token uses some (mixture of experts); 0: a single one")
    experts_per_token: int = knob(2, "experts that a token uses: 1 as Switch, 2 as Mixtral")
    expert_capacity: float = knob(
        0.0, "capacity of an expert, in mean loads (Switch: 1.25); tokens above it skip the block; 0: no limit"
    )
    balance_weight: float = knob(0.01, "weight of the loss that keeps experts equally busy (arXiv:2101.03961)")
    router_z_weight: float = knob(0.0, "weight of the loss that keeps router logits small; 1e-3 is usual (ST-MoE)")

    def find_hidden_width(self) -> int:
        """Return the width inside the perceptron."""
        if self.hidden_width:
            return self.hidden_width
        if self.kind == "gpt":
            return 4 * self.width
        # Two thirds of four times the width makes as many weights as GPT's two layers.
        return -(-8 * self.width // (3 * WIDTH_MULTIPLE)) * WIDTH_MULTIPLE

    def find_head_width(self) -> int:
        """Return the width of an attention head."""
        return self.head_width or self.width // self.heads


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data, and the order in which it is read."""

    path: str = knob("", "text, parquet or .bin file, or a folder of them; empty: text that ships with Python")
    column: str = knob("text", "column of a parquet file that holds the text")
    stream: str = knob("", "bucket or folder of token files that are fetched while they are needed, in place of path")
    cache: str = knob("", "folder for fetched chunks; empty: in the system's folder for temporary files")
    cache_gib: float = knob(16.0, "maximum size of the cache on a node's disk")
    chunk_mib: float = knob(4.0, "size of a chunk of a stream, fetched by one request")
    shuffle_chunks: int = knob(64, "chunks of a stream whose windows are shuffled among each other")
    seed: int = knob(0, "seed of the shuffle")
    validation_share: float = knob(0.01, "share of the windows kept for evaluation, if the data has no val file")
    document_mask: bool = knob(
        False, "keep attention within each document of a window, and restart positions there; a separator ends one"
    )
    mask_share: float = knob(0.0, "share of tokens that are hidden and predicted (BERT: 0.15); 0: predict the next one")
    mask_id: int = knob(-1, "id that replaces a hidden token; -1: that of --init-from, or a new one")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Steps, batch size and learning rate."""

    steps: int = knob(200, "optimizer steps in the whole run")
    batch: int = knob(16, "samples per step, over all ranks")
    micro_batch: int = knob(8, "maximum samples of one forward pass on one rank; gradients are accumulated")
    learning_rate: float = knob(2e-3, "peak of the learning rate")
    learning_rate_min: float = knob(2e-4, "learning rate at the last step")
    warmup_steps: int = knob(20, "steps of linear warm-up to the peak")
    weight_decay: float = knob(0.1, "weight decay of matrices per step, times the learning rate")
    norm_max: float = knob(1.0, "gradients are clipped to this norm")
    z_loss: float = knob(0.0, "weight of log(Z)^2 in the loss, which keeps logits small; 1e-4 is usual (PaLM)")
    on_nan: str = knob("stop", "action after a step without finite gradients", ("stop", "skip"))
    skips_max: int = knob(10, "consecutive skipped steps after which the run stops")
    seed: int = knob(0, "seed of the weights and of dropout")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The checkpoint interval, and the number of checkpoints to keep."""

    every_steps: int = knob(
        AUTOMATIC,
        "steps between checkpoints; 0 saves only at the end and on preemption; -1 chooses the best interval",
    )
    keep: int = knob(3, "complete checkpoints kept")
    peer_every_steps: int = knob(
        0, "elastic fsdp, zero1, zero2: steps between copies of each part to the memory of another node; 0: none"
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Evaluation on held-out samples."""

    every_steps: int = knob(0, "steps between evaluations; 0: never")
    samples: int = knob(64, "samples of one evaluation, the same ones each time")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters, trained beside frozen weights (LoRA, arXiv:2106.09685)."""

    rank: int = knob(0, "rank of the adapters; 0 trains all weights")
    alpha: float = knob(16.0, "the adapters' output is multiplied by alpha / rank")
    targets: str = knob(
        "attention", "linear layers with an adapter: those of attention, or all of a block", ("attention", "all")
    )


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Text that the trained model generates."""

    tokens: int = knob(80, "tokens to generate; 0: none")
    prompt: str = knob("\n", "text to continue")
    temperature: float = knob(0.8, "below 1 prefers likely tokens; 0 always takes the likeliest")
    seed: int = knob(0, "seed of the choice")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Logging, in addition to broker's progress file."""

    every_steps: int = knob(
        1, "steps between two lines on stdout and in the files; the host waits for a GPU only at these steps"
    )
    metrics: str = knob("", "JSON lines are appended to this file")
    tensorboard: str = knob("", "folder for TensorBoard's event files; needs the package tensorboard")
    peak_tflops: float = knob(0.0, "peak of one device, to compute MFU; 0: by its name")


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """Limits after which a run that hangs is ended, so that it can be restarted."""

    timeout_s: float = knob(
        600.0, "longest time for a step, and for a restore without a byte read by any rank; 0 disables the watchdog"
    )
    start_s: float = knob(
        1800.0, "longest time for data, compilation and all else until the first step is done; 0 waits forever"
    )
    checkpoint_s: float = knob(
        7200.0, "longest time to write a checkpoint, and for a rank to wait for the others in it; 0 waits forever"
    )

    @property
    def collective_s(self) -> float:
        """The limit in seconds for a rank that waits for another one in a step: 60 s, or more if steps may be long."""
        return max(60.0, self.timeout_s / 10) if self.timeout_s else 0.0


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """A trace of some steps, for Perfetto or chrome://tracing."""

    steps: int = knob(0, "steps to trace; 0: none")
    first: int = knob(10, "step of this attempt at which the trace begins")
    folder: str = knob("profile", "folder for the trace of each rank")


@dataclass(frozen=True, kw_only=True)
class RunConfig(StrategyOptions):
    """Options that every trainer has."""

    dtype: str = knob(
        "float32",
        "arithmetic of forward and backward; weights stay float32. float16 is for GPUs without bfloat16; float8 is for "
        "the linear layers of blocks, beside bfloat16 (needs torchao; emulated on CPUs)",
        ("float32", "bfloat16", "float16", "float8"),
    )
    matmul_precision: str = knob(
        "high", "float32 products on a GPU: high is TensorFloat-32, highest is float32 (slower)", ("high", "highest")
    )
    deterministic: bool = knob(
        False, "use deterministic algorithms, so that a resumed run is bit-identical on GPUs too; slower there"
    )
    compile: bool = knob(False, "compile the model's blocks with torch.compile: slow to start, fast to run")
    recompute: str = knob(
        "none",
        "activation checkpointing: blocks computed again in the backward pass instead of kept: all, or every second",
        ("none", "selective", "full"),
    )
    elastic: str = knob(
        "",
        "fewest:most ranks, such as `2:4`: continue without lost ranks, and admit new ones; empty: by `min_nodes`",
    )
    warm: bool = knob(
        False, "elastic: keep a second process per rank that has imported torch, in which the rank restarts (Linux)"
    )
    prefetch: bool = knob(True, "gather the next step's samples while this one computes")
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    log: LogConfig = field(default_factory=LogConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """All options of a language model run."""

    init_from: str = knob("", "folder of a Hugging Face model that provides the initial shape and weights")
    fused_loss: bool = knob(
        False, "compute last layer and loss together, in chunks of positions, so that logits are never held whole"
    )
    scale_report: bool = knob(
        False, "measure weak and strong scaling over this node's devices in short runs, and do not train"
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)


def parse_config(arguments: Sequence[str], program: str = "python -m trainers.lm") -> Config:
    """Read flags, a config file and a preset; exit with code 2 on invalid values."""
    return parse_flags(
        Config,
        arguments,
        program=program,
        description="Train a language model, GPT- or Llama-style, on any number of nodes; run it again to resume.",
        presets=PRESETS,
        find_problem=find_problem,
    )


def find_problem(config: Config) -> str | None:
    """Return the problem in a config, or None."""
    model = config.model
    positive = {
        "--model.depth": model.depth,
        "--model.width": model.width,
        "--model.heads": model.heads,
        "--model.context": model.context,
        "--model.vocabulary_multiple": model.vocabulary_multiple,
        "--data.shuffle_chunks": config.data.shuffle_chunks,
    }
    problem = find_small(positive, 1) or find_run_problem(config) or find_expert_problem(model)
    if problem := problem or find_mask_problem(config):
        return problem
    if model.width % model.heads and not model.head_width:
        return f"`--model.width {model.width}` is not a multiple of `--model.heads {model.heads}`"
    if model.key_value_heads and model.heads % model.key_value_heads:
        return f"`--model.heads {model.heads}` is not a multiple of `--model.key_value_heads {model.key_value_heads}`"
    if model.kind == "llama" and model.find_head_width() % 2:
        return "rotary embedding turns pairs: `--model.width` over `--model.heads` must be even"
    if not 0.0 <= model.dropout < 1.0:
        return f"`--model.dropout` must be in [0, 1), not {model.dropout}"
    if model.kind == "llama" and model.dropout:
        return "`--model.kind llama` has no dropout"
    if not 0.0 <= config.data.validation_share < 1.0:
        return f"`--data.validation_share` must be in [0, 1), not {config.data.validation_share}"
    if config.data.stream and config.data.path:
        return "`--data.stream` takes the place of `--data.path`"
    if model.positions and model.positions < model.context:
        return f"`--model.positions {model.positions}` is below `--model.context {model.context}`"
    if model.rope_scaling and not re.fullmatch(ROPE_SCALING, model.rope_scaling):
        return f"`--model.rope_scaling {model.rope_scaling}` is not like `linear:8` or `llama3:8,1,4,8192`"
    natural = {
        "--model.vocabulary": model.vocabulary,
        "--model.hidden_width": model.hidden_width,
        "--model.head_width": model.head_width,
        "--lora.rank": config.lora.rank,
    }
    return find_small(natural, 0)


def find_expert_problem(model: ModelConfig) -> str | None:
    """Return the problem in the settings of a mixture of experts, or None."""
    natural = {
        "--model.experts": model.experts,
        "--model.expert_capacity": model.expert_capacity,
        "--model.balance_weight": model.balance_weight,
        "--model.router_z_weight": model.router_z_weight,
    }
    if problem := find_small(natural, 0) or find_small({"--model.experts_per_token": model.experts_per_token}, 1):
        return problem
    if model.experts and model.experts_per_token > model.experts:
        return f"`--model.experts_per_token {model.experts_per_token}` is above `--model.experts {model.experts}`"
    return None


def find_mask_problem(config: "Config") -> str | None:
    """Return the problem in the settings of an encoder, or None."""
    share = config.data.mask_share
    if not 0.0 <= share < 1.0:
        return f"`--data.mask_share` must be in [0, 1), not {share}"
    if share and not config.model.bidirectional and not config.init_from:
        return "`--data.mask_share` trains an encoder: add `--model.bidirectional`"
    if config.model.bidirectional and not share:
        return "`--model.bidirectional` shows a model the next token: add `--data.mask_share 0.3`"
    others = {"--fused_loss": config.fused_loss, "--data.document_mask": config.data.document_mask}
    if used := [name for name, value in others.items() if value and share]:
        return f"`--data.mask_share` cannot be combined with `{used[0]}`"
    return None


def find_run_problem(config: RunConfig) -> str | None:
    """Return the problem in the settings that every trainer has, or None."""
    train = config.train
    positive = {
        "--train.steps": train.steps,
        "--train.batch": train.batch,
        "--train.micro_batch": train.micro_batch,
        "--train.skips_max": train.skips_max,
        "--checkpoint.keep": config.checkpoint.keep,
        "--evaluate.samples": config.evaluate.samples,
        "--log.every_steps": config.log.every_steps,
        "--profile.first": config.profile.first,
    }
    natural = {
        "--train.warmup_steps": train.warmup_steps,
        "--evaluate.every_steps": config.evaluate.every_steps,
        "--profile.steps": config.profile.steps,
        "--checkpoint.peer_every_steps": config.checkpoint.peer_every_steps,
        "--watchdog.timeout_s": config.watchdog.timeout_s,
        "--watchdog.start_s": config.watchdog.start_s,
        "--watchdog.checkpoint_s": config.watchdog.checkpoint_s,
        "--train.z_loss": train.z_loss,
    }
    drifting = [name for name in config.strategy.split("+") if name in SEPARATE]
    if config.dtype == "float16" and drifting:
        return f"`--dtype float16` cannot be combined with `--strategy {drifting[0]}`: all ranks need one loss scale"
    if config.elastic:
        try:
            _, most = parse_elastic(config.elastic)
        except ValueError as error:
            return str(error)
        if config.strategy in EVERY_RANK_READS and most > train.batch:  # the run would end when they have arrived
            return f"`--elastic {config.elastic}` may have more ranks than `--train.batch {train.batch}` has samples"
    return (
        find_small(positive, 1)
        or find_small(natural, 0)
        or find_small({"--checkpoint.every_steps": config.checkpoint.every_steps}, AUTOMATIC)
    )


def find_small(values: Mapping[str, float], least: int) -> str | None:
    """Return the first flag whose value is below its minimum."""
    for flag, value in values.items():
        if not value >= least:
            return f"`{flag}` must be at least {least}, not {value}"
    return None
