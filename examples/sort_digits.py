"""A task that can be checked, for reinforcement learning: sort six digits.

    python examples/sort_digits.py --output demo/sorting      # tokenizer, texts for a first training, prompts
    finetune.py --objective grpo --reward-funcs examples/sort_digits.py:in_order ...

``in_order`` is a reward function as ``--reward-funcs`` takes it (TRL's signature): it gets the completions of a prompt
and the columns of its row, here ``answer``. ``make rl-demo`` runs all of it.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

DIGITS = 6


def in_order(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 for the digits in order and nothing else; else 0.2 x the share of digits that are where they belong."""
    return [
        1.0 if said == right else 0.2 * sum(a == b for a, b in zip(said, right, strict=False)) / len(right)
        for said, right in zip(completions, answer, strict=True)
    ]


def write_tokenizer(folder: Path) -> None:
    """A token for each digit, one for "=", one that ends a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = ["<end>", "<unknown>", "=", *map(str, range(10))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(""), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


def write_rows(folder: Path, count: int = 20_000) -> None:
    """Texts "314159=113459" to begin with, and prompts with the answer in a column."""
    draw = random.Random(0)
    with (folder / "texts.jsonl").open("w") as texts, (folder / "prompts.jsonl").open("w") as prompts:
        for _ in range(count):
            digits = draw.choices("0123456789", k=DIGITS)
            prompt, answer = f"{''.join(digits)}=", "".join(sorted(digits))
            texts.write(json.dumps({"text": prompt + answer}) + "\n")
            prompts.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")


def main() -> None:
    """Write everything to a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    write_rows(folder)


if __name__ == "__main__":
    main()
