"""Prompts and reward functions for tests of reinforcement learning."""

from __future__ import annotations

import json
from pathlib import Path

from tests.training.tiny_hf import write_model, write_tokenizer

REWARDS = '''
def vowels(completions, **columns):
    completions = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(c in "aeiou" for c in text) / max(len(text), 1) for text in completions]

def short(completion_ids, **columns):
    return [-len(ids) / 16 for ids in completion_ids]

def even(prompts, number):
    """Does not apply to odd numbers."""
    return [None if n % 2 else float(len(p) % 3) for p, n in zip(prompts, number)]

def broken(completions, number):
    if number[0] == 7:
        raise ValueError("no reward for seven")
    return [float(len(text) % 2) for text in completions]

def rare(completion_ids, **columns):
    return [float(ids[0] % 16 == 0) for ids in completion_ids]
'''
STEPS = (
    "--train-iters 4 --seq-length 48 --micro-batch-size 2 --global-batch-size 8 --lr 0.02 --optimizer sgd "
    "--num-generations 4 --max-completion-length 9 --generation-batch-size 5"
)


def write_inputs(folder: Path, kind: str = "llama", **model: int) -> None:
    """A model, prompts of unequal lengths, and functions."""
    write_tokenizer(folder)
    write_model(folder, kind, **{"layers": 2, **model})
    # Many ids end a text, so that random ones end at different lengths.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, *range(100, 130)]}))
    rows = [{"prompt": f"what is {'one ' * (i % 4)}{i}? ", "number": i} for i in range(24)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = [{"messages": [{"role": "user", "content": f"what is {i}?"}], "answer": str(i)} for i in range(24)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    (folder / "rewards.py").write_text(REWARDS)


def write_reward_model(folder: Path) -> None:
    """A Hugging Face classifier of one label, with a tokenizer."""
    import torch
    import transformers

    write_tokenizer(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 96, "vocab_size": 300}
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**sizes, initializer_range=0.3, num_labels=1, pad_token_id=2)
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)


def flags(folder: Path, method: str, *more: str) -> str:
    """A whole command line; {0} is the folder."""
    rewards = "" if "--reward-funcs" in method else "--reward-funcs {0}/rewards.py:vowels {0}/rewards.py:short"
    data = "" if "--data-path" in method else "--data-path {0}/prompts.jsonl"
    line = f"--load {{0}} --log-dir {{0}}/logs {STEPS} {data} {rewards} {method} {' '.join(more)}"
    return line.format(folder)
