"""A plain loop of transformers on samples with images: its own processor, one sample at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from smp.data.tuning.processor import open_processor
from smp.models.micro_batch import MicroBatch
from tests.training.any_model_lab import LR, documents


def load(folder: Path) -> Any:
    """The model of a folder, by transformers, in fp32."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


class Inputs:
    """What transformers makes of each line of a folder's samples."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.folder, self._processor = folder, open_processor(folder)
        self._rows = [json.loads(line) for line in (folder / "vl.jsonl").read_text().splitlines()]
        self._tokenizer, self._made = AutoTokenizer.from_pretrained(folder), dict[int, Any]()

    def of(self, ids: torch.Tensor) -> Any:
        """Of the sample with these tokens, which name its number."""
        found = re.search(r"picture (\d+)\?", self._tokenizer.decode(ids))
        assert found is not None
        number = int(found[1])
        if number not in self._made:
            self._made[number] = self._make(self._rows[number])
        return self._made[number]

    def _make(self, row: dict[str, Any]) -> Any:
        from PIL import Image

        if "messages" in row:
            messages = row["messages"]
        else:
            asked, answer = (turn["value"] for turn in row["conversations"])
            parts = [{"type": "image", "path": name} for name in row["images"]]
            messages = [
                {"role": "user", "content": [*parts, {"type": "text", "text": asked.replace("<image>\n", "")}]},
                {"role": "assistant", "content": [{"type": "text", "text": answer}]},
            ]
        shown = [part for m in messages for part in m["content"] if part["type"] == "image"]
        pictures = [Image.open(self.folder / part["path"]).convert("RGB") for part in shown]
        text = self._processor.apply_chat_template(messages)
        bos = self._processor.tokenizer.bos_token
        return self._processor(
            text=[text], images=pictures or None, return_tensors="pt", add_special_tokens=not text.startswith(bos)
        )


def vision_loop(
    folder: Path, steps: Sequence[Sequence[MicroBatch]], frozen: Sequence[str] = (), model: Any = None, lr: float = LR
) -> dict[str, Any]:
    """The same steps by transformers alone: plain SGD, logits in fp32; parameters whose names hold one of ``frozen``
    stay as they are."""
    model, inputs = (load(folder).train() if model is None else model), Inputs(folder)
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad and not any(part in name for part in frozen))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer, losses, norms = torch.optim.SGD(trained.values(), lr=lr), [], []
    for step in steps:
        total = torch.zeros(())
        for batch in step:
            for ids, labels, weights in documents(batch):
                made = {n: t.float() if t.is_floating_point() else t for n, t in inputs.of(ids).items()}
                count = len(ids)
                assert torch.equal(made["input_ids"][0, :count], ids), "its own processor gives the same tokens"
                logits = model(**made, use_cache=False).logits[0, :count].float()
                loss = (F.cross_entropy(logits, labels, reduction="none", ignore_index=-100) * weights).sum()
                loss.backward()
                total += loss.detach()
        losses.append(total.item())
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in trained.values() if p.grad is not None]).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "final": {n: p.detach() for n, p in trained.items()}}
