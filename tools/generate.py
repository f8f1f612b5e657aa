"""Print text that a trained model writes.

    python tools/generate.py --load checkpoints --tokenizer-model tokenizer.model --prompt "def main("

Reads the model from the checkpoint alone: its settings are in the manifest. Works on any machine whatever the layout
was.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed as dist

from smp import checkpoint
from smp.config import Layout, ModelConfig
from smp.data.tokenizer_files import PATTERNS, load_tokenizer
from smp.models.gpt import GPT
from smp.parallel.mesh import build_mesh


def load_model(folder: Path, device: torch.device) -> GPT:
    """The model of a checkpoint folder, in evaluation mode, in this one process."""
    extra = checkpoint.read_manifest(folder).extra
    config = ModelConfig(**{f.name: extra["config"][f.name] for f in fields(ModelConfig)})
    mesh = build_mesh(Layout(), device.type)
    model = GPT(config, mesh["tp"], device=device)
    with torch.no_grad():  # the vocabulary's padding rows are not in the checkpoint
        for parameter in model.parameters():
            parameter.zero_()
    tensors, _ = checkpoint.training_state(model)
    checkpoint.load(tensors, folder, logical_rows=checkpoint.collect_logical_rows(model), allow_unread=True)
    return model.eval()


@torch.no_grad()
def generate(
    model: GPT, prompt: list[int], count: int, temperature: float, top_k: int, seed: int, eod: int
) -> list[int]:
    """Up to ``count`` token ids after ``prompt``; temperature 0 takes the likeliest. Ends before ``eod``."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    while len(ids) - len(prompt) < count:
        window = torch.tensor([ids[-model.config.max_position_embeddings :]], device=device)
        logits = model(window)[0, -1].float().cpu()
        if temperature == 0:
            choice = int(logits.argmax())
        else:
            best = logits.topk(min(top_k, logits.numel()))
            weights = (best.values / temperature).softmax(dim=0)
            choice = int(best.indices[torch.multinomial(weights, 1, generator=generator)])
        if choice == eod:
            break
        ids.append(choice)
    return ids[len(prompt) :]


def main(argv: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--load", required=True, type=Path, help="folder of checkpoints, or one checkpoint's own folder"
    )
    parser.add_argument("--tokenizer-model", required=True, help="sentencepiece model, tokenizer.json or tiktoken file")
    parser.add_argument("--tiktoken-pattern", choices=PATTERNS, help="how a tiktoken file's text is cut")
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=100, help="tokens to write at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest token")
    parser.add_argument("--top-k", type=int, default=50, help="choose among this many tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the choices")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        folder = checkpoint.find(args.load)
        tokenizer = load_tokenizer(args.tokenizer_model, args.tiktoken_pattern)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
        model = load_model(folder, device)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ids = tokenizer.encode(args.prompt) or [tokenizer.eod]
    new = generate(model, ids, args.max_new_tokens, args.temperature, args.top_k, args.seed, tokenizer.eod)
    print(args.prompt + tokenizer.decode(new))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
