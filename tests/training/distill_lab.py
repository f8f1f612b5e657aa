"""What a distillation should give."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from smp.data.tuning.encode import Encoder
from smp.data.tuning.tokenizer import open_tokenizer


def divergence(folder: Path, teacher_folder: Path, beta: float, temperature: float) -> tuple[float, float]:
    """(the mean divergence, the mean cross-entropy) of all trained tokens of all samples, by transformers' models and
    formulas in fp64."""
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    student, teacher = (load(path, attn_implementation="eager").eval() for path in (folder, teacher_folder))
    encoder = Encoder(open_tokenizer(folder), None)
    divergences, entropies = [], []
    for line in (folder / "sft.jsonl").read_text().splitlines():
        ((ids, trained),) = encoder.sample(json.loads(line))
        with torch.no_grad():
            q, p = (m(torch.tensor([ids.tolist()])).logits[0, :-1].double() for m in (student, teacher))
        labels = torch.tensor(ids[1:]).long()
        entropies.append(torch.nn.functional.cross_entropy(q, labels, reduction="none")[trained[1:]])
        q, p = ((x / temperature).softmax(1) for x in (q, p))
        m = beta * p + (1 - beta) * q
        found = beta * (p * (p / m).log()).sum(1) + (1 - beta) * (q * (q / m).log()).sum(1)
        found = (p * (p / q).log()).sum(1) if beta == 0 else (q * (q / p).log()).sum(1) if beta == 1 else found
        divergences.append(found[trained[1:]])
    return float(torch.cat(divergences).mean()), float(torch.cat(entropies).mean())
