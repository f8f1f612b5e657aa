"""Print text that a model writes, one as it comes or many: to see what it learned, or that a conversion is right.

    python tools/generate.py --load checkpoints --tokenizer-model tokenizer.model --prompt "def main("
    python tools/generate.py --load Llama-3.2-1B --prompt "The capital of France is" --temperature 0 --dtype bf16
    python tools/generate.py --load HF_FOLDER --adapter runs/chat/adapter --chat
    python tools/generate.py --load HF_FOLDER --prompts questions.jsonl --num-samples 8 --output answers.jsonl

--load is a checkpoint of smp, a Hugging Face folder or one of Megatron's. Settings come from it alone, and so does the
tokenizer where it has one. --adapter is added to its weights as they are read. With --chat each line that you type is a
message and the model answers, through its chat template, until the input ends; --prompt is then the only message. With
--prompts, --output or several samples each text is a line of JSON. A text follows from --seed, the number of its prompt
and that of the sample alone. Works on any machine whatever the layout was.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from smp.config import ConfigError
from smp.config.command_line.command import CommandParser, refuse_existing, run_tool
from smp.config.command_line.hub import model_path, tokenizer_path
from smp.convert.formats import Opened
from smp.convert.huggingface.folder import end_ids
from smp.data.files.text_files import is_blank, parse_record, read_chunks
from smp.data.tokenizers.files import PATTERNS
from smp.data.tuning.chat_template import ChatTemplate
from smp.data.tuning.tokenizer import PieceTokenizer, TuningTokenizer
from smp.generation import Completion, Generator, Request, Sampling, Stops
from smp.models.protocol import Model
from smp.training.texts.text_model import (
    DTYPES,
    alone,
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
    out.add_argument(
        "--prompts", type=Path, help="file of prompts: .txt with one in each line, or .jsonl, .parquet, .csv, .json"
    )
    out.add_argument(
        "--json-key", default="prompt", help="key or column of a prompt in --prompts: text, or with --chat messages"
    )
    out.add_argument("--num-samples", type=int, default=1, help="texts for each prompt")
    out.add_argument("--batch-size", type=int, default=32, help="texts that are written at once")
    out.add_argument("--stop", nargs="+", default=[], help="strings that end a text; they are left out")
    out.add_argument("--output", type=Path, help="file for the texts, a line of JSON each (default: they are printed)")
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


@dataclass(frozen=True)
class Writer:
    """What writes texts.

    Attributes:
        encode: token ids of a prompt.
        decode: text of token ids, without special tokens.
        ends: ids that end a text.
        args: the command line.
    """

    encode: Callable[[Any], list[int]]
    decode: Decode
    ends: list[int]
    args: argparse.Namespace

    @property
    def sampling(self) -> Sampling:
        """The sampling that --temperature and so on ask for."""
        return Sampling(self.args.temperature, self.args.top_k, self.args.top_p, self.args.seed)

    @property
    def stops(self) -> Stops:
        """What ends texts."""
        return Stops(frozenset(self.ends), tuple(self.args.stop), self.decode)

    def request(self, prompt: Any, index: int = 0, sample: int = 0) -> Request:
        """One text."""
        return Request(self.encode(prompt), self.args.max_new_tokens, index, sample)

    def show(self, model: Model, prompt: Any, text: str = "") -> str:
        """Print ``text``, and what follows ``prompt`` as it comes, which is returned."""
        request, pieces = self.request(prompt), list[str]()
        # Refuses what cannot be before text is seen.
        tokens = Generator(model, batch_size=1).tokens(request, self.sampling, self.stops)
        print(text, end="", flush=True)

        def show(text: str) -> None:
            pieces.append(text)
            if not self.args.stop:
                print(text, end="", flush=True)

        ids = (token for token in tokens if token not in self.ends)
        written = stream(ids, list(request.prompt), self.decode, show)
        found = self.cut("".join(pieces))
        print(found if self.args.stop else "")  # a string that ends a text is known only when it is there
        total = len(request.prompt) + written
        if total == model.config.max_position_embeddings and written < self.args.max_new_tokens:
            print(f"note: the longest sequence of this model, {total} tokens, ends here", file=sys.stderr)
        return found

    def cut(self, text: str) -> str:
        """Without what --stop names, and behind it."""
        return text[: min((at for mark in self.args.stop if (at := text.find(mark)) >= 0), default=None)]

    def lines(self, model: Model, prompts: list[Any], file: TextIO) -> None:
        """Write a line for each text of ``prompts``, in their order."""
        order = [(index, sample) for index in range(len(prompts)) for sample in range(self.args.num_samples)]
        requests = [self.request(prompts[index], index, sample) for index, sample in order]
        ended, following = dict[tuple[int, int], Completion](), iter(order)
        place = next(following, None)
        for found in Generator(model, batch_size=self.args.batch_size).write(requests, self.sampling, self.stops):
            ended[found.request.index, found.request.sample] = found
            while place is not None and place in ended:
                file.write(json.dumps(self.line(ended.pop(place)), ensure_ascii=False) + "\n")
                file.flush()
                place = next(following, None)

    def line(self, found: Completion) -> dict[str, Any]:
        """What is said of a text."""
        text = self.cut(self.decode([i for i in found.ids if i not in self.ends]))
        said = {"prompt": found.request.index, "sample": found.request.sample, "text": text}
        return said | {"finish": found.finish, "tokens": len(found.ids), "log_prob": sum(found.log_probs)}


def read_prompts(path: Path, key: str) -> list[Any]:
    """Prompts of a file: the lines of a .txt file, or what is under a key of each record.

    Raises:
        ValueError: it is no such file, or a record has no such key.
    """
    if path.suffix == ".txt":
        return [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    prompts = []
    for chunk in read_chunks([path]):
        for number, raw in enumerate(chunk.records, chunk.first):
            if is_blank(raw, chunk.path):
                continue
            try:
                record = raw if isinstance(raw, dict) else parse_record(raw)
            except ValueError as error:
                raise ValueError(f"{path}: record {number}: {error}") from None
            if key not in record:
                raise ValueError(f"{path}: record {number} has no {key!r}; --json-key names what has the prompt")
            prompts.append(record[key])
    return prompts


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


def text_writer(opened: Opened, args: argparse.Namespace) -> Writer:
    """What continues texts; the tokenizer is there already."""
    tokenizer, ends = find_tokenizer(opened, args.tokenizer_model, args.tiktoken_pattern)

    def encode(prompt: Any) -> list[int]:
        if not isinstance(prompt, str):
            raise ValueError(f"a prompt is text, not {str(prompt)[:60]}; messages need --chat")
        return tokenizer.encode(prompt) or ends[:1]

    return Writer(encode, tokenizer.decode, ends, args)


def chat_writer(opened: Opened, args: argparse.Namespace) -> Writer:
    """What answers messages; the chat template is there already."""
    if args.tiktoken_pattern is not None:
        raise ValueError("--tiktoken-pattern has no effect with --chat, which takes the folder's own tokenizer")
    tokenizer, template, ends = open_chat(opened, args.tokenizer_model)

    def decode(ids: list[int]) -> str:
        return tokenizer.decode([i for i in ids if i not in tokenizer.special])

    def encode(prompt: Any) -> list[int]:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return tokenizer.encode(template.prompt(messages))

    return Writer(encode, decode, ends, args)


def converse(model: Model, writer: Writer, messages: Iterable[str]) -> None:
    """Answer messages, each after all before it."""
    said: list[dict[str, str]] = []
    for message in messages:
        said.append({"role": "user", "content": message})
        said.append({"role": "assistant", "content": writer.show(model, said)})


def check(args: argparse.Namespace) -> None:
    """Refuse flags that cannot be, or do not go together.

    Raises:
        ConfigError: there are such.
        FileExistsError: --output is there.
    """
    if args.num_samples < 1 or args.batch_size < 1:
        raise ConfigError("--num-samples and --batch-size must be 1 or more")
    if args.prompt and args.prompts:
        raise ConfigError("give --prompt or --prompts, not both")
    if "" in args.stop:
        raise ConfigError("--stop '' would end every text")
    if not args.prompts and args.json_key != "prompt":
        raise ConfigError("--json-key has no effect without --prompts; leave it out")
    if args.chat and not (args.prompt or args.prompts) and (args.num_samples > 1 or args.output):
        raise ConfigError("--num-samples and --output need --prompt or --prompts: typed messages have one answer each")
    if args.output:
        refuse_existing(args.output)


def work(args: argparse.Namespace) -> None:
    """Load, and write."""
    check(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    Sampling(args.temperature, args.top_k, args.top_p, args.seed)  # refuses what cannot be before a model is read
    prompts = read_prompts(args.prompts, args.json_key) if args.prompts else [args.prompt]
    opened = open_model(args.load, args.adapter, args.reference)
    writer = chat_writer(opened, args) if args.chat else text_writer(opened, args)
    with alone(device):
        model = load_model(opened, device, DTYPES[args.dtype])
        for note in opened.weights.notes:
            print(f"note: {note}", file=sys.stderr)
        if args.output:
            with args.output.open("x", encoding="utf-8") as file:
                writer.lines(model, prompts, file)
        elif args.prompts or args.num_samples > 1:
            writer.lines(model, prompts, sys.stdout)
        elif args.chat:
            converse(model, writer, prompts if args.prompt else typed())
        else:
            writer.show(model, args.prompt, args.prompt)


def main(argv: list[str]) -> int:
    """Command line; returns the exit code, see :mod:`smp.config.command_line.command`."""
    return run_tool(lambda: work(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
