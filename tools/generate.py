"""Print text that a model writes, token by token: to see what it learned, or that a conversion is right.

    python tools/generate.py --load checkpoints --tokenizer-model tokenizer.model --prompt "def main("
    python tools/generate.py --load Llama-3.2-1B --prompt "The capital of France is" --temperature 0 --dtype bf16
    python tools/generate.py --load HF_FOLDER --adapter runs/chat/adapter --chat

--load is a checkpoint of smp, a Hugging Face folder or one of Megatron's. Settings come from it alone, and so does the
tokenizer where it has one. --adapter is added to its weights as they are read. With --chat each line that you type is a
message and the model answers, through its chat template, until the input ends; --prompt is then the only message. Works
on any machine whatever the layout was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from smp.config.command import CommandParser, run_tool
from smp.config.hub import model_path, tokenizer_path
from smp.convert.formats import Opened
from smp.data.tokenizer_files import PATTERNS
from smp.data.tuning.chat_template import ChatTemplate
from smp.data.tuning.tokenizer import PieceTokenizer, TuningTokenizer
from smp.models.generation import Sampling, generate
from smp.models.gpt import GPT
from smp.training.text_model import (
    DTYPES,
    alone,
    end_ids,
    find_tokenizer,
    folder_tokenizer,
    load_model,
    open_model,
)

Decode = Callable[[list[int]], str]
_UNFINISHED = "\ufffd"  # what decoders write for a character of which only some bytes are there


def open_chat(opened: Opened, given: Path | None) -> tuple[TuningTokenizer, ChatTemplate, list[int]]:
    """The tokenizer, how it writes a conversation, and the ids that end an answer.

    Raises:
        ValueError: one of them is missing.
    """
    tokenizer = folder_tokenizer(opened, given)
    if tokenizer.template is None:
        if isinstance(tokenizer, PieceTokenizer):
            raise ValueError(f"{tokenizer.path} is a sentencepiece model: --chat needs a folder with tokenizer.json")
        raise ValueError(f"--chat: {given or opened.reference} has no chat template")
    template = ChatTemplate(tokenizer.template, tokenizer.template_tokens)
    return tokenizer, template, [*end_ids(opened.reference), tokenizer.eos]


def stream(ids: Iterable[int], before: list[int], decode: Decode, show: Callable[[str], Any]) -> int:
    """Show the text of ``ids``, which follow ``before``, as far as characters are complete; returns their number."""
    known, shown = list(before), len(decode(before))
    text = ""
    for token in ids:
        known.append(token)
        text = decode(known)
        if not text.endswith(_UNFINISHED):
            show(text[shown:])
            shown = len(text)
    show(text[shown:])
    return len(known) - len(before)


def parser() -> CommandParser:
    """All flags."""
    out = CommandParser(description=__doc__)
    out.add_argument(
        "--load",
        required=True,
        type=model_path,
        help="folder of checkpoints, one checkpoint, a Hugging Face folder, or hub:NAME",
    )
    out.add_argument(
        "--tokenizer-model",
        type=tokenizer_path,
        help="tokenizer file or folder (default: the one in --load)",
    )
    out.add_argument("--tiktoken-pattern", choices=PATTERNS, help="how text is split before a tiktoken file's merges")
    out.add_argument(
        "--reference", type=Path, help="Hugging Face folder for what --load lacks (tokenizer, config.json)"
    )
    out.add_argument("--adapter", type=Path, help="folder in peft's format, or checkpoints of a LoRA run")
    out.add_argument("--prompt", default="", help="text to continue")
    out.add_argument("--chat", action="store_true", help="answer messages: --prompt, or every line of the input")
    out.add_argument("--max-new-tokens", type=int, default=100, help="largest number of tokens to write")
    out.add_argument(
        "--temperature", type=float, default=0.8, help="sampling temperature; 0 always takes the most likely token"
    )
    out.add_argument("--top-k", type=int, default=50, help="sample from this many most likely tokens; 0: all")
    out.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the most likely tokens whose probabilities add up to this"
    )
    out.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    out.add_argument("--dtype", choices=DTYPES, default="fp32", help="precision of weights and arithmetic")
    return out


def write(
    model: GPT, prompt: list[int], args: argparse.Namespace, ends: list[int], decode: Decode, text: str = ""
) -> str:
    """Print ``text``, and what follows ``prompt`` as it comes, which is returned."""
    sampling, pieces = Sampling(args.temperature, args.top_k, args.top_p, args.seed), list[str]()
    new = generate(model, prompt, args.max_new_tokens, sampling, ends)  # refuses what cannot be before text is seen
    print(text, end="", flush=True)

    def show(text: str) -> None:
        pieces.append(text)
        print(text, end="", flush=True)

    written = stream(new, prompt, decode, show)
    print()
    total = len(prompt) + written
    if total == model.config.max_position_embeddings and written < args.max_new_tokens:
        print(f"note: the longest sequence of this model, {total} tokens, ends here", file=sys.stderr)
    return "".join(pieces)


def typed() -> Iterator[str]:
    """Lines of the input, with a mark before each where somebody types."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def continue_text(opened: Opened, args: argparse.Namespace) -> Callable[[GPT], None]:
    """What prints --prompt and its continuation; the tokenizer is there already."""
    tokenizer, ends = find_tokenizer(opened, args.tokenizer_model, args.tiktoken_pattern)

    def run(model: GPT) -> None:
        write(model, tokenizer.encode(args.prompt) or ends[:1], args, ends, tokenizer.decode, args.prompt)

    return run


def answer_messages(opened: Opened, args: argparse.Namespace) -> Callable[[GPT], None]:
    """What answers messages, each after all before it; the chat template is there already."""
    if args.tiktoken_pattern is not None:
        raise ValueError("--tiktoken-pattern has no effect with --chat, which takes the folder's own tokenizer")
    tokenizer, template, ends = open_chat(opened, args.tokenizer_model)

    def decode(ids: list[int]) -> str:
        return tokenizer.decode([i for i in ids if i not in tokenizer.special])

    def run(model: GPT) -> None:
        messages: list[dict[str, str]] = []
        for message in [args.prompt] if args.prompt else typed():
            messages.append({"role": "user", "content": message})
            text = write(model, tokenizer.encode(template.prompt(messages)), args, ends, decode)
            messages.append({"role": "assistant", "content": text})

    return run


def work(args: argparse.Namespace) -> None:
    """Load, and write."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    Sampling(args.temperature, args.top_k, args.top_p, args.seed)  # refuses what cannot be before a model is read
    opened = open_model(args.load, args.adapter, args.reference)
    answer = answer_messages(opened, args) if args.chat else continue_text(opened, args)
    with alone(device):
        model = load_model(opened, device, DTYPES[args.dtype])
        for note in opened.weights.notes:
            print(f"note: {note}", file=sys.stderr)
        answer(model)


def main(argv: list[str]) -> int:
    """Command line; returns the exit code, see :mod:`smp.config.command`."""
    return run_tool(lambda: work(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
