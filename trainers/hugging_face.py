"""Convert shapes and weights from and to Hugging Face: GPT-2, Llama, Mistral, Mixtral, Qwen and EuroBERT.

This module imports no torch, because the shape of a folder is read before flags are checked.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.config import Config, ModelConfig
from trainers.errors import TrainerError

if TYPE_CHECKING:
    from torch import Tensor, nn

MODEL_TYPES = ("eurobert", "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
MIXTURES = ("mixtral", "qwen3_moe")
ARCHITECTURES = {
    "eurobert": "EuroBertForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
ARCHITECTURES |= {"qwen3": "Qwen3ForCausalLM", "mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
# Hugging Face's name of an activation -> ours.
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
# Fields of ModelConfig that describe how a model is trained, not its shape.
TRAINED_BY = ("context", "dropout", "expert_capacity", "balance_weight", "router_z_weight")
MIXTRAL_LAYERS = {"gate": "w1", "expand": "w3", "project": "w2"}
LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Weight:
    """The names of one tensor here and in Hugging Face's files.

    `layout`: equal, transposed, packed (queries, keys and values in one tensor), or stacked: they have one tensor per
    expert, and `theirs` contains `{}` in place of its number.
    """

    ours: str
    theirs: str
    layout: str = "equal"


def adopt_shape(config: Config) -> Config:
    """Return the config with the shape of the model in `--init-from`, or unchanged if that is not given.

    Context, dropout and the training of experts follow the flags. Raises TrainerError for an unsupported folder.
    """
    if not config.init_from:
        return config
    folder = Path(config.init_from)
    try:
        content = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise TrainerError(f"`--init-from {folder}`: cannot read `config.json`: {error}") from error
    shape = read_shape(content, context=config.model.context)
    kept = {name: getattr(config.model, name) for name in TRAINED_BY}
    model = ModelConfig(**{**shape, **kept})
    if bool(config.data.mask_share) != model.bidirectional:
        need = "add `--data.mask_share 0.3`" if model.bidirectional else "omit `--data.mask_share`"
        raise TrainerError(f"`--init-from {folder}` is {'an encoder' if model.bidirectional else 'a decoder'}: {need}")
    mask_id = content.get("mask_token_id") if config.data.mask_id < 0 else config.data.mask_id
    data = dataclasses.replace(config.data, mask_id=-1 if mask_id is None else mask_id)
    return dataclasses.replace(config, model=model, data=data)


def read_shape(content: Mapping[str, Any], *, context: int) -> dict[str, Any]:
    """Return the fields of our ModelConfig from a `config.json`. Raises TrainerError for unsupported models."""
    kind = content.get("model_type")
    if kind not in MODEL_TYPES:
        raise TrainerError(f"cannot train a `{kind}`; known: {', '.join(MODEL_TYPES)}")
    if "quantization_config" in content:
        raise TrainerError("cannot train quantized weights; use the original ones")
    shape = _read_gpt2(content) if kind == "gpt2" else _read_llama(content, str(kind), context)
    if context > shape["positions"]:
        raise TrainerError(f"the model has {shape['positions']} positions, fewer than `--model.context {context}`")
    return {**shape, "vocabulary": content["vocab_size"], "vocabulary_multiple": 1}


def find_window(content: Mapping[str, Any]) -> int | None:
    """Return the number of tokens to which each one attends; None if it attends to all earlier ones."""
    kind = str(content.get("model_type"))
    if not content.get("use_sliding_window", kind.startswith("mi")):
        return None
    window: int | None = content.get("sliding_window", 4096 if kind == "mistral" else None)  # as in Transformers
    return window


def _read_gpt2(content: Mapping[str, Any]) -> dict[str, Any]:
    activation = content.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        raise TrainerError(f"unsupported activation `{activation}`; known: {', '.join(ACTIVATIONS)}")
    if content.get("scale_attn_by_inverse_layer_idx") or not content.get("scale_attn_weights", True):
        raise TrainerError("unsupported attention: its scores are scaled by layer, or not at all")
    return {
        "kind": "gpt",
        "depth": content["n_layer"],
        "width": content["n_embd"],
        "heads": content["n_head"],
        "hidden_width": content.get("n_inner") or 0,
        "positions": content["n_positions"],
        "activation": ACTIVATIONS[activation],
        "norm_epsilon": float(content.get("layer_norm_epsilon", 1e-5)),
        "tie_embeddings": bool(content.get("tie_word_embeddings", True)),
    }


def _read_llama(content: Mapping[str, Any], kind: str, context: int) -> dict[str, Any]:
    if content.get("hidden_act", "silu") != "silu" or content.get("mlp_bias"):
        raise TrainerError("unsupported perceptron: it has biases, or an activation other than `silu`")
    window = find_window(content)
    if window and window < context:
        raise TrainerError(f"attention has a window of {window} tokens, fewer than `--model.context {context}`")
    # Transformers 5 has `rope_parameters`; earlier releases have two fields.
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    theta = rope.get("rope_theta", content.get("rope_theta", 10000.0))
    bias = "qkv" if kind == "qwen2" else "all" if content.get("attention_bias") else "none"
    return {
        "kind": "llama",
        "depth": content["num_hidden_layers"],
        "width": content["hidden_size"],
        "heads": content["num_attention_heads"],
        "key_value_heads": content.get("num_key_value_heads") or 0,
        "head_width": content.get("head_dim") or 0,
        "hidden_width": content["moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"],
        "positions": content["max_position_embeddings"],
        "norm_epsilon": float(content.get("rms_norm_eps", 1e-6)),
        "rope_theta": float(theta),
        "rope_scaling": _read_scaling(rope),
        "attention_bias": bias,
        "query_key_norm": kind.startswith("qwen3"),
        "bidirectional": kind == "eurobert",
        "tie_embeddings": bool(content.get("tie_word_embeddings", False)),
        **(_read_experts(content, kind) if kind in MIXTURES else {}),
    }


def _read_experts(content: Mapping[str, Any], kind: str) -> dict[str, Any]:
    uses = content["num_experts_per_tok"]
    if kind == "qwen3_moe" and (content.get("mlp_only_layers") or content.get("decoder_sparse_step", 1) != 1):
        raise TrainerError("unsupported model: only some of its layers have experts")
    if uses == 1 or (kind == "qwen3_moe" and not content.get("norm_topk_prob")):
        raise TrainerError("unsupported experts: their weights do not add up to 1, or a token uses only one")
    # Before Transformers 5, Qwen3's files used another name.
    return {"experts": content.get("num_local_experts", content.get("num_experts")), "experts_per_token": uses}


def _read_scaling(rope: Mapping[str, Any]) -> str:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if float(rope.get("partial_rotary_factor", 1.0)) != 1.0 or kind not in ("default", "linear", "llama3"):
        raise TrainerError(f"unsupported rotary embedding `{kind}`; known: default, linear, llama3")
    if kind == "default":
        return ""
    names = LLAMA3_SCALING if kind == "llama3" else ("factor",)
    return f"{kind}:" + ",".join(str(float(rope[name])) for name in names)


def write_shape(model: ModelConfig, *, dtype: str, mask_id: int | None = None) -> dict[str, Any]:
    """Return a `config.json` with which Transformers computes the same function as our model.

    Transformers has no equivalent of `expert_capacity`. `mask_id` is the id of an encoder's hidden tokens. Raises
    TrainerError for mixtures other than Mixtral's and Qwen3's, and for encoders other than EuroBERT's
    (arXiv:2503.05500).
    """
    if model.experts:
        _check_mixture(model)
    is_plain = model.kind == "llama" and not model.experts and not model.query_key_norm
    if model.bidirectional and not (is_plain and model.attention_bias != "qkv"):
        raise TrainerError(
            "Hugging Face has no encoder of this shape; it requires `--model.kind llama` without experts and without "
            "`--model.query_key_norm`\n\nhint: export without `--format hf`"
        )
    positions = max(model.positions, model.context)
    common = {"vocab_size": model.vocabulary, "tie_word_embeddings": model.tie_embeddings, "torch_dtype": dtype}
    if model.kind == "gpt":
        return {
            "model_type": "gpt2",
            "architectures": [ARCHITECTURES["gpt2"]],
            "n_layer": model.depth,
            "n_embd": model.width,
            "n_head": model.heads,
            "n_inner": model.hidden_width or None,
            "n_positions": model.positions or model.context,
            "activation_function": "gelu_new" if model.activation == "gelu_tanh" else "gelu",
            "layer_norm_epsilon": model.norm_epsilon,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), model.dropout),
            **common,
        }
    kind = _choose_kind(model)
    name, _, values = model.rope_scaling.partition(":")
    keys = LLAMA3_SCALING if name == "llama3" else ("factor",)
    scaling: dict[str, Any] | None = (
        {"rope_type": name, **dict(zip(keys, map(float, values.split(",")), strict=True))} if name else None
    )
    if scaling and name == "llama3":
        scaling["original_max_position_embeddings"] = int(scaling["original_max_position_embeddings"])
    return {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "num_hidden_layers": model.depth,
        "hidden_size": model.width,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_value_heads or model.heads,
        "head_dim": model.head_width or model.width // model.heads,
        "intermediate_size": model.find_hidden_width(),
        "max_position_embeddings": positions,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "attention_bias": model.attention_bias == "all",
        **(_write_experts(model, kind) if model.experts else {}),
        # The default padding id may lie beyond the vocabulary.
        **({"mask_token_id": mask_id, "pad_token_id": None} if model.bidirectional else {}),
        **common,
    }


def _choose_kind(model: ModelConfig) -> str:
    """Return the Hugging Face model type of a model with Llama's blocks."""
    if model.bidirectional:
        return "eurobert"
    if model.experts:
        return "qwen3_moe" if model.query_key_norm else "mixtral"
    return "qwen3" if model.query_key_norm else "qwen2" if model.attention_bias == "qkv" else "llama"


def _check_mixture(model: ModelConfig) -> None:
    shapes = {
        "`--model.kind gpt`": model.kind == "gpt",
        "`--model.experts_per_token 1`": model.experts_per_token == 1,
        "`--model.attention_bias qkv`": model.attention_bias == "qkv",
        "`--model.attention_bias all` without `--model.query_key_norm`": (
            model.attention_bias == "all" and not model.query_key_norm
        ),
    }
    if problems := [name for name, is_so in shapes.items() if is_so]:
        raise TrainerError(
            f"Hugging Face has no mixture of experts with {' and '.join(problems)}\n\n"
            "hint: export without `--format hf`"
        )


def _write_experts(model: ModelConfig, kind: str) -> dict[str, Any]:
    names = {"num_experts": model.experts, "moe_intermediate_size": model.find_hidden_width(), "norm_topk_prob": True}
    return {
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        **(names if kind == "qwen3_moe" else {}),
    }


def list_weights(model: ModelConfig) -> Iterator[Weight]:
    """Yield every tensor of a model of this shape. A tied head is the embedding."""
    yield from _list_gpt2(model) if model.kind == "gpt" else _list_llama(model)
    if not model.tie_embeddings:
        yield Weight("head.weight", "lm_head.weight")


def _list_gpt2(model: ModelConfig) -> Iterator[Weight]:
    yield Weight("token_embedding.weight", "transformer.wte.weight")
    yield Weight("position_embedding.weight", "transformer.wpe.weight")
    # GPT-2's layers are `Conv1D`: inputs x outputs.
    layers = {"attention.project": "attn.c_proj", "perceptron.expand": "mlp.c_fc", "perceptron.project": "mlp.c_proj"}
    norms = {"attention_norm": "ln_1", "perceptron_norm": "ln_2"}
    for place in range(model.depth):
        ours, theirs = f"blocks.{place}.", f"transformer.h.{place}."
        for part in ("weight", "bias"):
            packed = f"{theirs}attn.c_attn.{part}"
            yield Weight(f"{ours}attention.query_key_value.{part}", packed, "packed")
            for name, other in norms.items():
                yield Weight(f"{ours}{name}.{part}", f"{theirs}{other}.{part}")
            for name, other in layers.items():
                layout = "transposed" if part == "weight" else "equal"
                yield Weight(f"{ours}{name}.{part}", f"{theirs}{other}.{part}", layout)
    for part in ("weight", "bias"):
        yield Weight(f"norm.{part}", f"transformer.ln_f.{part}")


def _list_llama(model: ModelConfig) -> Iterator[Weight]:
    yield Weight("token_embedding.weight", "model.embed_tokens.weight")
    names = {
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.project": "self_attn.o_proj",
        "attention_norm": "input_layernorm",
        "perceptron_norm": "post_attention_layernorm",
    }
    layers = {"gate": "gate_proj", "expand": "up_proj", "project": "down_proj"}
    stacks, router = {name: f"mlp.experts.{{}}.{other}" for name, other in layers.items()}, "mlp.gate"
    if not model.query_key_norm:  # Mixtral's names; Qwen3 uses others
        stacks = {name: f"block_sparse_moe.experts.{{}}.{other}" for name, other in MIXTRAL_LAYERS.items()}
        router = "block_sparse_moe.gate"
    if model.experts:
        names["perceptron.router"] = router
    else:
        names |= {f"perceptron.{name}": f"mlp.{other}" for name, other in layers.items()}
    if model.query_key_norm:
        names |= {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
    biased = {"none": 0, "qkv": 3, "all": 4}[model.attention_bias]
    for place in range(model.depth):
        ours, theirs = f"blocks.{place}.", f"model.layers.{place}."
        for name, other in names.items():
            yield Weight(f"{ours}{name}.weight", f"{theirs}{other}.weight")
        for name, other in list(names.items())[:biased]:
            yield Weight(f"{ours}{name}.bias", f"{theirs}{other}.bias")
        for name, other in stacks.items() if model.experts else ():
            yield Weight(f"{ours}perceptron.{name}.weight", f"{theirs}{other}.weight", "stacked")
    yield Weight("norm.weight", "model.norm.weight")


def load_weights(network: "nn.Module", model: ModelConfig, folder: Path) -> None:
    """Load the weights of a Hugging Face folder into the network, or into the parts of it on this rank."""
    import torch

    from trainers.models.decoder import fill_parameter
    from trainers.safetensors import SafetensorsFolder

    files = SafetensorsFolder(folder)
    weights = {weight.ours: weight for weight in list_weights(model)}
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            weight = weights.get(name)
            if weight is None or parameter.is_meta:  # an adapter, or on another stage of a pipeline
                continue
            if weight.layout == "stacked":
                whole = torch.stack([files.read(weight.theirs.format(expert)) for expert in range(model.experts)])
            else:
                # The original GPT-2 files omit the prefix.
                theirs = weight.theirs if weight.theirs in files else weight.theirs.removeprefix("transformer.")
                whole = to_ours(files.read(theirs), weight.layout, model)
            if whole.shape != parameter.shape:
                raise TrainerError(
                    f"`{folder}`: `{weight.theirs}` has the shape {list(whole.shape)}, but `config.json` implies "
                    f"{list(parameter.shape)}"
                )
            fill_parameter(parameter, whole.to(parameter.device, parameter.dtype))


def to_ours(tensor: "Tensor", layout: str, model: ModelConfig) -> "Tensor":
    """Convert a tensor from Hugging Face's layout to ours, which packs queries, keys and values head by head."""
    if layout == "equal":
        return tensor
    outputs_first = tensor.t() if tensor.dim() == 2 else tensor
    if layout == "transposed":
        return outputs_first.contiguous()
    parts = outputs_first.reshape(3, model.heads, -1, *outputs_first.shape[1:])
    return parts.transpose(0, 1).reshape(outputs_first.shape).contiguous()


def rename(tensors: Mapping[str, "Tensor"], model: ModelConfig) -> dict[str, "Tensor"]:
    """Return all tensors of a model with Hugging Face's names and layouts."""
    renamed: dict[str, Tensor] = {}
    for weight in list_weights(model):
        tensor = tensors[weight.ours]
        if weight.layout == "stacked":
            renamed |= {weight.theirs.format(expert): part for expert, part in enumerate(tensor.unbind(0))}
        else:
            renamed[weight.theirs] = to_theirs(tensor, weight.layout, model)
    return renamed


def to_theirs(tensor: "Tensor", layout: str, model: ModelConfig) -> "Tensor":
    """Convert a tensor from our layout to Hugging Face's: the inverse of `to_ours`."""
    if layout == "packed":
        parts = tensor.reshape(model.heads, 3, -1, *tensor.shape[1:])
        tensor = parts.transpose(0, 1).reshape(tensor.shape)
    if layout != "equal" and tensor.dim() == 2:
        tensor = tensor.t()
    return tensor.contiguous()
