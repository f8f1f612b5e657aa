"""--dry-run of fine-tuning: adapters are counted as they lie on one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from smp.config import Config, Layout
from smp.config.cli import build_tree
from smp.config.entry_points import FINETUNE
from smp.config.finetune import fill_in
from smp.config.schema import ObjectiveConfig
from smp.convert.hf_config import resolved
from smp.layers import add_adapters
from smp.models.gpt import GPT
from smp.training.describe import adapter_elements, describe
from tests.fake_group import fake_context

MODEL = resolved(
    num_layers=3, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=9
)


def tuning(tmp_path: Path, **lora: object) -> Config:
    config = build_tree(FINETUNE, {"load": str(tmp_path), "dry_run": True, **lora})
    return fill_in(replace(config, model=MODEL))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("targets", [None, "query,down", "layers.1.*,output"])
def test_adapters_are_counted_as_they_lie_on_a_process(tmp_path: Path, tp: int, targets: str | None) -> None:
    config = tuning(tmp_path, lora_rank=3, lora_target_modules=targets)
    with fake_context(Layout(tp=tp)) as context:
        model = GPT(MODEL, context.tp)
        assert config.lora is not None and config.lora.lora_target_modules is not None
        add_adapters(model, config.lora.lora_target_modules.split(","), 3, 6.0)
        parts: list[torch.Tensor] = [p.to_local() for p in model.parameters() if p.requires_grad]  # type: ignore[operator]
    assert adapter_elements(config, Layout(tp=tp)) == sum(part.numel() for part in parts) > 0


def test_an_adapter_from_a_file_is_counted_by_its_size(tmp_path: Path) -> None:
    assert adapter_elements(tuning(tmp_path, load_adapter=str(tmp_path)), Layout()) == 0
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(4000))
    assert adapter_elements(tuning(tmp_path, load_adapter=str(tmp_path)), Layout()) == 1000


def test_a_dry_run_shows_less_memory_with_adapters_and_more_with_a_copy(tmp_path: Path) -> None:
    large = resolved(num_layers=32, hidden_size=2048, num_attention_heads=16, vocab_size=32000)

    def gigabytes(config: Config) -> float:
        config.model, config.data.seq_length, config.data.global_batch_size = large, 512, 1
        lines = describe(config, 1).splitlines()
        return float(next(line.split()[2] for line in lines if line.startswith("#   total")))

    full, lora, pairs = tuning(tmp_path), tuning(tmp_path, lora_rank=8), tuning(tmp_path)
    pairs.objective = ObjectiveConfig(objective="dpo", dpo_reference="copy")
    assert gigabytes(lora) < 0.5 * gigabytes(full) and gigabytes(pairs) > 1.2 * gigabytes(full)
