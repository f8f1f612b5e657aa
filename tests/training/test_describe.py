"""--dry-run of fine-tuning: adapters are counted as they lie on one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from smp.config import Config, Layout, load_config, resolve
from smp.config.command_line.cli import build_tree
from smp.config.command_line.entry_points import FINETUNE
from smp.config.objectives import ObjectiveConfig
from smp.config.rules.finetune import fill_in
from smp.convert.huggingface.config import resolved
from smp.kernels import matmul
from smp.layers import add_adapters
from smp.models.gpt import GPT
from smp.models.presets import PRESETS
from smp.training.cost.describe import describe
from smp.training.cost.memory import MemoryEstimate
from smp.training.cost.predict import adapter_elements, predicted_memory
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


def test_frozen_experts_are_shared_by_all_processes_whatever_their_degree(tmp_path: Path) -> None:
    """ep takes from FSDP what it cuts, so a process holds one eighth of the weights at any degree."""

    def held(ep: int) -> MemoryEstimate:
        config = tuning(tmp_path, lora_rank=2, hybrid_shard_degree=8, expert_model_parallel_size=ep)
        config.model = replace(MODEL, num_experts=8, moe_ffn_hidden_size=16, moe_router_topk=2)
        config.data.seq_length, config.data.global_batch_size = 16, 8
        return predicted_memory(config, 8)

    estimates = [held(ep) for ep in (1, 2, 8)]
    assert len({(e.parameters, e.gradients, e.optimizer) for e in estimates}) == 1
    assert estimates[0].parameters > 0 and estimates[2].gathered < estimates[0].gathered


def test_a_dry_run_shows_less_memory_with_adapters_and_more_with_a_copy(tmp_path: Path) -> None:
    large = resolved(num_layers=3, hidden_size=2048, num_attention_heads=16, vocab_size=32000)

    def gigabytes(config: Config) -> float:
        config.model, config.data.seq_length, config.data.global_batch_size = large, 512, 1
        lines = describe(config, 1).splitlines()
        return float(next(line.split()[2] for line in lines if line.startswith("#   total")))

    full, lora, pairs = tuning(tmp_path), tuning(tmp_path, lora_rank=8), tuning(tmp_path)
    pairs.objective = ObjectiveConfig(objective="dpo", dpo_reference="copy")
    assert gigabytes(lora) < 0.5 * gigabytes(full) and gigabytes(pairs) > 1.2 * gigabytes(full)


def test_a_dry_run_of_a_gpu_says_the_same_on_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(model=resolved(num_layers=2, hidden_size=256, num_attention_heads=4, vocab_size=1000))
    config.data.seq_length, config.data.global_batch_size = 512, 1
    said = []
    for slow in (True, False):
        monkeypatch.setattr(matmul, "SLOW_MKL", slow)
        monkeypatch.setattr(matmul, "COPIES_PAY", slow)
        said.append([line for line in describe(config, 1).splitlines() if line.startswith("#") and " s " not in line])
    assert said[0] == said[1] and any("total" in line for line in said[0])


def test_a_dry_run_says_what_context_parallelism_saves_and_sends() -> None:
    """Of 32 query and 8 key/value heads of 128, 131,072 tokens over 8 processes in bf16: the figures are by hand."""

    def config_of(cp: int, *flags: str) -> Config:
        words = "--model llama3.1-8b --num-layers 2 --bf16 --seq-length 131072 --dry-run --vocab-size 8192"
        return resolve(load_config([*words.split(), "--context-parallel-size", str(cp), *flags], PRESETS), cp)

    def lines(cp: int, *flags: str) -> list[str]:
        return describe(config_of(cp, *flags), cp).splitlines()

    def gigabytes(found: list[str], name: str) -> float:
        return float(next(line.split()[-2] for line in found if line.startswith(f"#   {name}")))

    one, two, eight = lines(1), lines(2, "--cp-comm-type", "a2a"), lines(8, "--cp-comm-type", "p2p")
    assert "# mesh: cp 8 = 8 processes" in eight and not any("context parallelism" in line for line in one)
    whole = predicted_memory(config_of(1), 1)
    for found, cp in ((two, 2), (eight, 8)):
        assert predicted_memory(config_of(cp), cp).activations == pytest.approx(whole.activations / cp, rel=1e-3)
        assert gigabytes(found, "optimizer") == pytest.approx(gigabytes(one, "optimizer") / cp, rel=1e-3)
        # Both vocabulary matrices and two blocks in bf16, the gradient of one such matrix in fp32: 1.14. And 512 MiB of
        # logits at a time, whatever the length.
        gathered = 1.2 + 0.54 * (1 - 1 / cp)
        assert gigabytes(found, "peak in forward") < gigabytes(one, "peak in forward") / cp + gathered
    assert any(line.split()[1:3] == ["cp", "all-to-all"] for line in eight)
    sent = [line.split()[1] for line in eight if " MiB forward" in line]
    assert sent == ["p2p", "all_gather", "a2a"]
    assert [line.split()[1] for line in eight if "<- --cp-comm-type" in line] == ["p2p"]
    assert [line.split()[1] for line in two if "<- --cp-comm-type" in line] == ["a2a"]
    p2p = next(line for line in eight if line.startswith("#   p2p")).split()
    a2a = next(line for line in eight if line.startswith("#   a2a ")).split()
    assert (p2p[2], p2p[5]) == ("448.0", "1344.0")
    assert (a2a[2], a2a[5]) == ("281.8", "280.0")
