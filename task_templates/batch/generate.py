"""Generate texts with vLLM, which schedules the prompts of a batch itself. A worker of `broker map` calls `process`."""

import os
from typing import Any

from vllm import LLM, SamplingParams

llm = LLM(
    model=os.environ["MODEL"],
    tensor_parallel_size=max(1, int(os.environ.get("SKYPILOT_NUM_GPUS_PER_NODE", 1))),
    seed=0,
)
# Greedy: a shard that is computed again has the same texts, except for rounding in batches of another size.
SAMPLING = SamplingParams(temperature=0.0, max_tokens=int(os.environ.get("TOKENS_MAX", 256)))


def process(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a text for each item's `prompt`, with its `id` if it has one."""
    conversations = [[{"role": "user", "content": item["prompt"]}] for item in items]
    answers = llm.chat(conversations, SAMPLING, use_tqdm=False)
    return [
        {**({"id": item["id"]} if "id" in item else {}), "text": answer.outputs[0].text}
        for item, answer in zip(items, answers, strict=True)
    ]
