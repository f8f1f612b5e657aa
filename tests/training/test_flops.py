"""TFLOP/s count attention by the documents that there are, and a perplexity is shown of what has one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.config import Config, Layout, LoggingConfig, ModelConfig, resolve_model
from smp.config.distillation import DistillationConfig
from smp.config.objectives import ObjectiveConfig
from smp.config.rollouts import RolloutConfig
from smp.config.schema import LoraConfig
from smp.config.vision import VisionConfig
from smp.models.arithmetic import training_flops_per_token
from smp.training.reporting.console import Console
from tests.training.flag_runs import Watched, run_here
from tests.training.tiny_hf import WORDS, write_tokenizer

TEXTS = "--no-mock-data --data-path {0}/texts.jsonl --tokenizer-model {0}/tokenizer.json --vocab-size 300 "
CASES = {
    "mock": "",
    "window": "--window-size 5",
    "one document to all": TEXTS,
    "documents": TEXTS + "--reset-attention-mask",
    "documents, window": TEXTS + "--reset-attention-mask --window-size 3",
    "best-fit": TEXTS + "--reset-attention-mask --packing best-fit",
    "best-fit, one document to all": TEXTS + "--packing best-fit",
}


@pytest.mark.parametrize("case", CASES)
def test_flops_are_those_of_the_tokens_that_are_seen(case: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in WORDS * 30))
    seen: list[tuple[int, int]] = []  # tokens, and pairs that a mask leaves, of each step
    counted = count_batches(seen, "reset-attention-mask" in CASES[case])
    run = run_here(tmp_path / "run", CASES[case].format(tmp_path), probe=counted)
    assert run.code == 0, run.err
    model = run.config.model
    alone = training_flops_per_token(model, 1, model.vocab_size or 0)  # of a token that sees itself
    pair = 3 * model.num_layers * 4 * 4 * 8  # layers x heads x width
    rates = zip(run.records("TFLOP/s per process"), run.records("seconds per iteration"), seen, strict=True)
    for rate, seconds, (tokens, pairs) in rates:
        assert rate * seconds * 1e12 == pytest.approx(alone * tokens + pair * (pairs - tokens), rel=1e-6)
    assert seen[0][1] < 4 * 17 * 18 / 2 or case in ("mock", "one document to all")


def count_batches(seen: list[tuple[int, int]], documents: bool) -> Any:
    """After a run: reads its three batches again, and counts in their masks."""

    def count(run: Watched) -> None:
        dataset, window = run.datasets.train, run.config.model.window_size or 17
        place = torch.arange(17)
        distance = place[:, None] - place
        for step in range(3):
            tokens = pairs = 0
            for sample in map(dataset.sample, range(4 * step, 4 * step + 4)):
                real = place < 17 - sample.padding
                mask = (distance >= 0) & (distance < window) & real[:, None] & real
                if documents:
                    ids = torch.from_numpy(sample.document_ids)
                    mask &= ids[:, None] == ids
                tokens, pairs = tokens + int(real.sum()), pairs + int(mask.sum())
            seen.append((tokens, pairs))

    return count


@pytest.mark.parametrize("objective", [None, "sft", "dpo"])
def test_only_an_entropy_has_a_perplexity(objective: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config(
        model=resolve_model(ModelConfig(vocab_size=32)),
        objective=None if objective is None else ObjectiveConfig(objective),
        lora=None if objective is None else LoraConfig(),
        rollouts=None if objective is None else RolloutConfig(),
        distillation=None if objective is None else DistillationConfig(),
        vision=None if objective is None else VisionConfig(),
        logging=LoggingConfig(log_dir=str(tmp_path), tensorboard=False, progress_bar=False),
    )
    console = Console(config, Layout(), 0, torch.device("cpu"), 0)
    console.evaluation(3, 0.5)
    console.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record["validation loss"] == 0.5 and ("validation perplexity" in record) == (objective != "dpo")
    assert ("PPL" in capsys.readouterr().out) == (objective != "dpo")
