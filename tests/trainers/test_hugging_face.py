"""Hugging Face's models in and out: tiny random ones of `transformers`, of every family that is known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.tiers import spread
from trainers.config import ModelConfig, parse_config
from trainers.errors import TrainerError
from trainers.export import SPECIAL_IDS, find_special_ids
from trainers.export import main as export
from trainers.hugging_face import adopt_shape, read_shape, rename, write_shape
from trainers.lm import build
from trainers.lm import main as train
from trainers.models import create_language_model
from trainers.prepare import main as prepare
from trainers.safetensors import write_safetensors
from trainers.serve_model import load_model
from trainers.tokenizers import create_tokenizer, find_tokenizer, warn_of_other_tokenizer

from .strategies.conftest import Worlds, read_lines, read_losses


def hugging_face() -> Any:
    """Import `transformers` where it is needed: it takes over a second, and every worker imports this module."""
    return pytest.importorskip("transformers")


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

VOCABULARY, CONTEXT = 260, 24  # bytes, and a few ids of no use
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-4,
}
MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "llama": ("LlamaConfig", SMALL),
    "llama-3.1": (
        "LlamaConfig",
        {**SMALL, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}, "attention_bias": True},
    ),
    "llama-linear": (
        "LlamaConfig",
        {**SMALL, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "mistral": ("MistralConfig", {**SMALL, "head_dim": 16, "sliding_window": 32}),
    "qwen2": ("Qwen2Config", {**SMALL, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**SMALL, "head_dim": 16}),
    "eurobert": ("EuroBertConfig", {**SMALL, "mask_token_id": 259, "pad_token_id": None}),
    "mixtral": ("MixtralConfig", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**SMALL, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"norm_topk_prob": True},
    ),
}


ENCODER = ["--data.mask_share", "0.3"]


def find_class(name: str) -> Any:
    return hugging_face().AutoModelForMaskedLM if name == "eurobert" else hugging_face().AutoModelForCausalLM


def save_model(folder: Path, name: str) -> Any:
    """Save a model of the family with all weights changed: norms and biases must arrive, too."""
    torch.manual_seed(1)
    class_name, fields = MODELS[name]
    model = find_class(name).from_config(getattr(hugging_face(), class_name)(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def load_here(folder: Path, *flags: str) -> nn.Module:
    config = adopt_shape(parse_config(["--init-from", str(folder), "--model.context", str(CONTEXT), *flags]))
    recipe = build(config, torch.device("cpu"))
    assert recipe.fill is not None
    recipe.fill(torch.device("cpu"))
    return recipe.model.eval()


def compute_logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(VOCABULARY, (3, CONTEXT), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        outputs = model(tokens)
    logits: torch.Tensor = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    return logits


@pytest.mark.parametrize("name", spread(list(MODELS), every=6))
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    theirs = save_model(tmp_path, name)
    ours = load_here(tmp_path, *(ENCODER if name == "eurobert" else ()))
    torch.testing.assert_close(compute_logits(ours), compute_logits(theirs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", spread(list(MODELS), every=6))
def test_trained_model_returns_to_transformers(worlds: Worlds, tmp_path: Path, name: str) -> None:
    """Trained for two steps, exported and loaded by name; the same weights in ours compute the same."""
    save_model(tmp_path / "start", name)
    (tmp_path / "start/tokenizer.json").write_text("{}")
    flags = ["--init-from", str(tmp_path / "start"), "--model.context", str(CONTEXT), "--train.steps", "2"]
    flags += ["--train.batch", "4", "--train.micro_batch", "2", "--sample.tokens", "0", "--train.warmup_steps", "0"]
    encoder = ENCODER if name == "eurobert" else []
    flags += encoder
    ended = worlds.call(tmp_path / "run", "trainers.lm:main", [*flags, "--strategy", "ddp"], ranks=1)
    assert ended.codes == [0], ended.errors
    checkpoints = str(tmp_path / "run/checkpoints")
    assert export([str(tmp_path / "end"), "--checkpoint", checkpoints, "--format", "hf"]) == 0
    assert (tmp_path / "end/tokenizer.json").read_text() == "{}"
    theirs, info = find_class(name).from_pretrained(tmp_path / "end", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert getattr(theirs.config, "mask_token_id", None) == (259 if encoder else None)
    started = json.loads((tmp_path / "start/config.json").read_text())
    assert encoder or theirs.config.eos_token_id == started["eos_token_id"]
    ours, before = (compute_logits(load_here(tmp_path / place, *encoder)) for place in ("end", "start"))
    torch.testing.assert_close(ours, compute_logits(theirs.eval()), rtol=1e-5, atol=1e-5)
    assert (ours - before).abs().max() > 1e-3, "it was trained"


@pytest.mark.parametrize(
    ("strategy", "name"),
    spread([("fsdp", "qwen2"), ("pipeline", "llama"), ("tensor", "llama"), ("expert", "mixtral")], every=4),
)
def test_spread_model_begins_with_the_same_loss(worlds: Worlds, tmp_path: Path, strategy: str, name: str) -> None:
    save_model(tmp_path / "start", name)
    flags = ["--init-from", str(tmp_path / "start"), "--model.context", str(CONTEXT), "--train.steps", "2"]
    flags += ["--train.batch", "4", "--train.micro_batch", "2", "--sample.tokens", "0", "--checkpoint.every_steps", "0"]
    losses = []
    for ranks, chosen in ((1, "ddp"), (2, strategy)):
        ended = worlds.call(tmp_path / chosen, "trainers.lm:main", [*flags, "--strategy", chosen], ranks=ranks)
        assert ended.codes == [0] * ranks, ended.errors
        losses.append([each[0] for each in read_losses(tmp_path / chosen).values()])
    assert losses[0] == pytest.approx(losses[1], abs=2e-6)


LORA = ["--model.depth", "2", "--model.width", "32", "--model.heads", "4", "--model.context", "32", "--lora.rank", "4"]


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    spread([("ddp", 2), ("fsdp", 2), ("parameter_server", 3)], every=0, more=3),
)
def test_killed_run_with_adapters_resumes_bit_identically(
    worlds: Worlds, tmp_path: Path, strategy: str, ranks: int
) -> None:
    flags = ("--lora.rank", "4", "--lora.targets", "all", "--model.dropout", "0.1")
    whole = worlds.train(tmp_path / "whole", strategy, *flags, ranks=ranks)
    worlds.train(tmp_path / "broken", strategy, *flags, ranks=ranks, kill_after=6)
    broken = worlds.train(tmp_path / "broken", strategy, *flags, ranks=ranks, attempt=2)
    assert any(line["event"] == "resumed" for line in read_lines(tmp_path / "broken"))
    assert sorted(broken) == sorted(whole)
    assert all(loss == whole[step][0] for step, losses in broken.items() for loss in losses)


def test_adapters_start_neutral_are_the_only_change_and_can_be_merged(worlds: Worlds, tmp_path: Path) -> None:
    theirs = save_model(tmp_path / "start", "llama")
    with_adapters = load_here(tmp_path / "start", "--lora.rank", "4")
    torch.testing.assert_close(compute_logits(with_adapters), compute_logits(theirs), rtol=1e-5, atol=1e-5)
    trained = {name for name, parameter in with_adapters.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 4 * 2 and all(name.endswith(("lora_a", "lora_b")) for name in trained)
    flags = ["--init-from", str(tmp_path / "start"), "--model.context", str(CONTEXT), "--train.steps", "3"]
    flags += ["--train.batch", "4", "--sample.tokens", "0", "--train.warmup_steps", "0", "--lora.rank", "4"]
    ended = worlds.call(tmp_path / "run", "trainers.lm:main", flags, ranks=1)
    assert ended.codes == [0], ended.errors
    checkpoints = str(tmp_path / "run/checkpoints")
    assert export([str(tmp_path / "end"), "--checkpoint", checkpoints, "--format", "hf"]) == 0
    assert export([str(tmp_path / "plain.safetensors"), "--checkpoint", checkpoints]) == 0
    merged = hugging_face().AutoModelForCausalLM.from_pretrained(tmp_path / "end").eval()
    for name, parameter in merged.named_parameters():
        is_equal = torch.equal(parameter, dict(theirs.named_parameters())[name])
        assert is_equal == ("self_attn" not in name), name
    # The merged weights compute what the trained model did, adapters beside weights.
    from safetensors.torch import load_file

    with_adapters.load_state_dict(load_file(tmp_path / "plain.safetensors"))
    torch.testing.assert_close(compute_logits(merged), compute_logits(with_adapters), rtol=1e-5, atol=1e-5)


def test_adapters_cannot_be_cut(worlds: Worlds, tmp_path: Path) -> None:
    ended = worlds.call(tmp_path, "trainers.lm:main", ["--strategy", "tensor", *LORA], ranks=2)
    assert ended.codes == [1, 1] and "`--lora.rank` cannot be combined with `tensor`" in ended.errors


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "bert"}, "cannot train a `bert`; known: eurobert, gpt2, llama"),
        ({"hidden_act": "gelu"}, "an activation other than `silu`"),
        ({"mlp_bias": True}, "it has biases"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "unsupported rotary embedding `yarn`"),
        ({"model_type": "mistral", "sliding_window": 16}, "a window of 16 tokens, fewer than `--model.context 24`"),
        ({"quantization_config": {}}, "quantized"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1}, "a token uses only one"),
        ({**MOE, "norm_topk_prob": False}, "do not add up to 1"),
        ({**MOE, "mlp_only_layers": [0]}, "only some of its layers have experts"),
        ({"max_position_embeddings": 8}, "has 8 positions, fewer than `--model.context 24`"),
    ],
)
def test_model_with_impossible_dimensions_is_refused(changes: dict[str, Any], reason: str) -> None:
    content = {"model_type": "llama", **SMALL, **changes}
    with pytest.raises(TrainerError, match=reason):
        read_shape(content, context=CONTEXT)


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, 16),
        ({"model_type": "mistral", "sliding_window": None}, 64),
        ({"model_type": "mistral", "max_position_embeddings": 5000}, 4096),  # the default of Transformers
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False, "attention_bias": True}, 64),
    ],
)
def test_served_context_ends_with_the_sliding_window(tmp_path: Path, fields: dict[str, Any], context: int) -> None:
    model = ModelConfig(kind="llama", depth=1, width=16, heads=2, vocabulary=8, positions=64, context=64)
    model = dataclasses.replace(model, attention_bias="qkv" if fields["model_type"] == "qwen2" else "none")
    network = create_language_model("llama", model)
    write_safetensors(tmp_path / "model.safetensors", rename(network.state_dict(), model), {})
    (tmp_path / "config.json").write_text(json.dumps(write_shape(model, dtype="float32") | fields))
    assert load_model(str(tmp_path), dtype=torch.float32)[1].context == context


def test_older_config_files_are_read() -> None:
    """Before transformers 5 the wave and its scaling were two fields."""
    scaling = {"type": "linear", "factor": 2}
    shape = read_shape({"model_type": "llama", **SMALL, "rope_theta": 7.0, "rope_scaling": scaling}, context=CONTEXT)
    assert (shape["rope_theta"], shape["rope_scaling"]) == (7.0, "linear:2.0")


def test_exported_model_ends_texts_as_its_tokenizer_does(tmp_path: Path) -> None:
    """By default, Llama's and Mistral's type of model would end them at id 2, whatever it means."""
    assert find_special_ids({"tokenizer": "bytes"}, "bytes")["eos_token_id"] == 0
    assert find_special_ids({}, "gpt2")["eos_token_id"] == 50256
    assert find_special_ids({}, str(tmp_path / "missing")) == dict.fromkeys(SPECIAL_IDS)
    (tmp_path / "config.json").write_text('{"eos_token_id": [7, 9], "bos_token_id": 8, "vocab_size": 10}')
    about = {"init_from": str(tmp_path), "tokenizer": "bytes"}
    assert find_special_ids(about, "bytes") == {"eos_token_id": [7, 9], "bos_token_id": 8}


def test_prepared_text_has_no_space_that_a_cut_adds(tmp_path: Path) -> None:
    """Llama 2's tokenizer begins each piece of text with a space."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.BPE({"\u2581": 0, "a": 1, "\n": 2}, []))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("a\n" * 3000)
    output = tmp_path / "tokens"
    flags = ["--output", str(output), "--tokenizer", str(tmp_path), "--validation-share", "0.5"]
    assert prepare([str(tmp_path / "text.txt"), *flags]) == 0
    for name in ("train", "val"):  # the boundary is the only cut
        assert (output / f"{name}-00000.bin").read_bytes() == b"\0" + b"\1\2" * 1500


def test_tokenizer_of_a_folder_encodes_ends_documents_and_decodes(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens(["<end>"])
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    tokenizer = create_tokenizer(str(tmp_path))
    assert (list(tokenizer.encode(b"two one six")), list(tokenizer.separator)) == ([1, 0, 2], [3])
    assert tokenizer.decode([1, 0, 3, 99]) == "two one <end>" and tokenizer.vocabulary == 4
    (tmp_path / "text.txt").write_text("one two one")
    output = tmp_path / "tokens"
    assert prepare([str(tmp_path / "text.txt"), "--output", str(output), "--tokenizer", str(tmp_path)]) == 0
    about = json.loads((output / "tokens.json").read_text())
    assert about["vocabulary"] == 4 and create_tokenizer(about["tokenizer"]).vocabulary == 4
    with pytest.raises(TrainerError, match=r"cannot read `.*tokenizer\.json`"):
        create_tokenizer(str(tmp_path / "none"))


def test_ids_of_a_tokenizer_may_have_gaps(tmp_path: Path) -> None:
    """Its number of tokens was taken for the bound of their ids, beyond which the model has no embedding."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "two": 300, "?": 2}, unk_token="?"))
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = create_tokenizer(str(tmp_path))
    assert tokenizer.vocabulary == 301 and list(tokenizer.encode(b"two")) == [300] and tokenizer.decode([300]) == "two"
    (tmp_path / "text.txt").write_text("two")
    assert prepare([str(tmp_path / "text.txt"), "--output", str(tmp_path / "out"), "--tokenizer", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "out/tokens.json").read_text())["dtype"] == "uint16"


def test_tokenizer_of_a_checkpoint_is_that_of_its_data(tmp_path: Path) -> None:
    """It was `bytes` unless `--init-from` had one, so a model of other tokens wrote nonsense."""
    config = parse_config(["--model.depth", "1", "--model.width", "16", "--model.heads", "2", "--model.context", "8"])
    assert find_tokenizer(build(config, torch.device("cpu")).about) == "bytes"
    older = {"init_from": str(tmp_path / "gone")}
    assert find_tokenizer({"init_from": "", "tokenizer": "gpt2"}) == "gpt2"
    assert find_tokenizer({**older, "tokenizer": "/tokens/of"}) == "/tokens/of"
    assert find_tokenizer(older) == str(tmp_path / "gone"), "unknown: whoever needs it says which folder is missing"
    assert find_tokenizer({"init_from": str(tmp_path)}) == find_tokenizer({}) == "bytes"
    (tmp_path / "tokenizer.json").touch()
    assert find_tokenizer({"init_from": str(tmp_path), "tokenizer": "/tokens/of"}) == str(tmp_path)


def test_data_of_another_tokenizer_than_the_model_s_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, same, other = (tmp_path / name for name in ("model", "same", "other"))
    for folder in (model, same, other):
        folder.mkdir()
    warn_of_other_tokenizer("bytes", model, is_gpt2=False)  # it has no tokenizer
    for folder in (model, same, other):
        (folder / "tokenizer.json").write_text("{}" if folder != other else "[]")
    warn_of_other_tokenizer("gpt2", model, is_gpt2=True)
    for known in (model, same, tmp_path / "gone"):
        warn_of_other_tokenizer(str(known), model, is_gpt2=False)
    assert capsys.readouterr().err == ""
    for name in ("bytes", "gpt2", str(other)):
        warn_of_other_tokenizer(name, model, is_gpt2=False)
        assert f"warning: the data was tokenized by `{name}`" in capsys.readouterr().err


def test_mistakes_are_one_line_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["--init-from", str(tmp_path)]) == 2
    assert "cannot read `config.json`" in capsys.readouterr().err
    assert export([str(tmp_path / "end"), "--checkpoint", str(tmp_path), "--format", "hf"]) == 1
    assert "no complete checkpoint" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    with pytest.raises(TrainerError, match="holds no readable safetensors"):
        load_here(tmp_path)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kind": "gpt"}, "`--model.kind gpt`"),
        ({"kind": "llama", "experts_per_token": 1}, "`--model.experts_per_token 1`"),
        ({"kind": "llama", "attention_bias": "qkv"}, "`--model.attention_bias qkv`"),
        ({"kind": "llama", "attention_bias": "all"}, "without `--model.query_key_norm`"),
    ],
)
def test_mixture_that_transformers_lacks_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(TrainerError, match=reason):
        write_shape(ModelConfig(experts=4, **fields), dtype="float32")


def test_encoder_requires_its_task_and_cannot_generate_text(tmp_path: Path) -> None:
    save_model(tmp_path / "encoder", "eurobert")
    save_model(tmp_path / "decoder", "llama")
    with pytest.raises(TrainerError, match=r"an encoder: add `--data.mask_share 0.3`"):
        load_here(tmp_path / "encoder")
    with pytest.raises(TrainerError, match=r"a decoder: omit `--data.mask_share`"):
        load_here(tmp_path / "decoder", *ENCODER)
    with pytest.raises(TrainerError, match="an encoder generates no text"):
        load_model(str(tmp_path / "encoder"), dtype=torch.float32)
    with pytest.raises(TrainerError, match="Hugging Face has no encoder of this shape"):
        write_shape(ModelConfig(kind="gpt", bidirectional=True), dtype="float32")


def test_flags_decide_how_experts_are_trained(tmp_path: Path) -> None:
    save_model(tmp_path, "mixtral")
    flags = ["--init-from", str(tmp_path), "--model.context", str(CONTEXT), "--model.expert_capacity", "1.25"]
    model = adopt_shape(parse_config([*flags, "--model.balance_weight", "0.5"])).model
    assert (model.experts, model.expert_capacity, model.balance_weight) == (4, 1.25, 0.5)
