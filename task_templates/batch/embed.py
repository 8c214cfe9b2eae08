"""Embed texts with a transformer: the mean of the last layer's states. A worker of `broker map` calls `process`."""

import os
import zlib
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

WORDS, LENGTH_MAX = 4096, 128
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(name: str) -> tuple[Any, Any]:
    """Return a function of texts to token ids and masks, and the model: one of the Hub's, or a tiny random one."""
    if name != "random":
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModel.from_pretrained(name)
        return lambda texts: tokenizer(texts, padding=True, truncation=True, return_tensors="pt"), model
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH_MAX,
    )  # fmt: skip
    return hash_words, BertModel(config)


def hash_words(texts: list[str]) -> dict[str, torch.Tensor]:
    """Return a token per word, by its checksum; the token 0 pads."""
    rows = [
        [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in text.split()[:LENGTH_MAX]] or [1] for text in texts
    ]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


tokenize, model = load(os.environ.get("MODEL", "random"))
model = model.to(DEVICE).eval()


@torch.inference_mode()
def process(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return an embedding for each item, with its `id` if it has one."""
    inputs = {name: value.to(DEVICE) for name, value in tokenize([each["text"] for each in items]).items()}
    states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    means = (states * mask).sum(1) / mask.sum(1)
    return [
        {**({"id": item["id"]} if "id" in item else {}), "embedding": [round(each, 6) for each in mean.tolist()]}
        for item, mean in zip(items, means, strict=True)
    ]
