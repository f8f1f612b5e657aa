"""TRL's SFTTrainer trains a transformed model as in one process. Pinned to the installed release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import smp
from smp.hf.trainer import parallelism_config
from tests.distributed import run_distributed
from tests.hf.families import VOCAB, build, whole, worst

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
STEPS, ROWS = 4, 8


def _rows() -> Any:
    """Prompts and answers of unequal lengths, as ids."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, VOCAB, (6 + row % 5,), generator=generator).tolist() for row in range(STEPS * ROWS)]
    masks = [[0] * (row % 3 + 1) + [1] * (len(one) - row % 3 - 1) for row, one in enumerate(ids)]
    return datasets.Dataset.from_dict({"input_ids": ids, "completion_mask": masks})


def _tokenizer() -> Any:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


def _trainer(model: Any, folder: str, ranks: int, **options: Any) -> Any:
    return trl.SFTTrainer(
        model,
        args=trl.SFTConfig(
            folder,
            per_device_train_batch_size=ROWS // 2 // ranks,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            learning_rate=1e-2,
            adam_epsilon=1e-3,
            lr_scheduler_type="constant",
            num_train_epochs=1,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            **options,
        ),
        train_dataset=_rows(),
        processing_class=_tokenizer(),
    )


def _numbers(trainer: Any) -> dict[str, list[float]]:
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {key: [entry[key] for entry in log] for key in ("loss", "grad_norm", "mean_token_accuracy", "num_tokens")}


def _alone(rank: int, world_size: int, folder: str) -> tuple[Any, Any]:
    model = build("Qwen3")
    numbers = _numbers(_trainer(model, folder, 1))
    return numbers, {name: p.detach().numpy() for name, p in model.named_parameters()}


def _parallel(rank: int, world_size: int, folder: str, wanted: Any, weights: Any) -> list[str]:
    smp.init({"tensor_parallel_degree": 2})
    model = smp.transform(build("Qwen3"))
    if smp.state.dp_size > 1:
        for layer in model.model.layers:
            fully_shard(layer, mesh=smp.state.data_mesh)
        fully_shard(model, mesh=smp.state.data_mesh)
    trainer = _trainer(model, folder, smp.state.dp_size, parallelism_config=parallelism_config())
    numbers = _numbers(trainer)
    for key, values in wanted.items():
        assert len(values) == STEPS
        assert numbers[key] == pytest.approx(values, rel=1e-5), key
    found = {name: whole(p) for name, p in model.named_parameters()}
    assert worst(found, {name: torch.from_numpy(w) for name, w in weights.items()})[0] <= 1e-5
    trainer.save_model(f"{folder}/final")
    torch.distributed.barrier()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/final")
    assert all(torch.equal(found[name], p) for name, p in loaded.named_parameters())
    return sorted(path.name for path in Path(folder, "final").iterdir())


@pytest.mark.parametrize("ranks", [2, 4])
def test_sft_trainer_trains_as_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": str(ranks)}.items():
        monkeypatch.setenv(name, value)  # as torchrun does, and accelerate wants; the group exists already
    [(numbers, weights)] = run_distributed(_alone, 1, str(tmp_path / "alone"))
    for names in run_distributed(_parallel, ranks, str(tmp_path), numbers, weights):
        assert "model.safetensors" in names and "config.json" in names
