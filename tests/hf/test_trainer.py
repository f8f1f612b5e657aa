"""transformers' own Trainer trains a transformed model as it trains the model in one process."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import smp
from smp.config import ConfigError
from smp.hf.trainer import _distributed_config, parallelism_config
from tests.distributed import run_distributed
from tests.hf.families import VOCAB, build, whole, worst

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
STEPS, ROWS = 6, 8


class _Rows(torch.utils.data.Dataset[Any]):
    """Sequences with unequal numbers of labels."""

    def __len__(self) -> int:
        return STEPS * ROWS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, VOCAB, (10,), generator=torch.Generator().manual_seed(row))
        return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(10) < row % 4, -100)}


def _trainer(model: Any, folder: str, **options: Any) -> Any:
    """Two micro-batches per step and data rank, ``ROWS`` sequences per step in all."""
    ranks = options.pop("ranks", 1)
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=ROWS // 2 // ranks,
            per_device_eval_batch_size=ROWS // ranks,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            learning_rate=1e-2,
            adam_epsilon=1e-3,
            lr_scheduler_type="constant",
            num_train_epochs=1,
            logging_steps=1,
            save_only_model=True,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            **options,
        ),
        train_dataset=_Rows(),
    )


def _numbers(trainer: Any) -> dict[str, list[float]]:
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    numbers = {key: [entry[key] for entry in log] for key in ("loss", "grad_norm")}
    found = trainer.predict(torch.utils.data.Subset(_Rows(), range(11)))  # the last batch is not full
    assert found.predictions.shape == (11, 10, VOCAB)
    return numbers | {"evaluation": [found.metrics["test_loss"]], "rows": found.predictions.mean((1, 2)).tolist()}


def _alone(rank: int, world_size: int, folder: str) -> tuple[Any, Any]:
    model = build("Qwen3")
    numbers = _numbers(_trainer(model, folder, save_strategy="no"))
    return numbers, {name: p.detach().numpy() for name, p in model.named_parameters()}


def _parallel(rank: int, world_size: int, folder: str, tp: int, wanted: Any, weights: Any) -> list[str]:
    smp.init({"tensor_parallel_degree": tp})
    fresh = smp.transform(build("Qwen3"))
    if smp.state.dp_size > 1:
        with pytest.raises(ConfigError, match="is not sharded, so each of the 2 data ranks"):
            _trainer(copy.deepcopy(fresh), folder, parallelism_config=parallelism_config(), save_strategy="no")
        for layer in fresh.model.layers:
            fully_shard(layer, mesh=smp.state.data_mesh)
        fully_shard(fresh, mesh=smp.state.data_mesh)
    trainer = _trainer(
        fresh, folder, ranks=smp.state.dp_size, parallelism_config=parallelism_config(), save_strategy="epoch"
    )
    numbers = _numbers(trainer)
    counts = trainer.accelerator.gather_for_metrics(torch.tensor(rank))  # of each process, as TRL wants them
    assert counts.tolist() == list(range(world_size))
    if smp.state.dp_size > 1:
        del wanted["evaluation"]  # Trainer's own is a mean of the means of data ranks
    for key, values in wanted.items():
        assert len(numbers[key]) == len(values)
        assert numbers[key] == pytest.approx(values, rel=1e-5), key
    found = {name: whole(p) for name, p in fresh.named_parameters()}
    assert worst(found, {name: torch.from_numpy(w) for name, w in weights.items()})[0] <= 1e-5
    trainer.save_model(f"{folder}/final")
    torch.distributed.barrier()
    for saved in (f"{folder}/final", f"{folder}/checkpoint-{STEPS}"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(saved)
        assert all(torch.equal(found[name], p) for name, p in loaded.named_parameters())
    return sorted(path.name for path in Path(folder, "final").iterdir())


def test_the_config_of_a_cut_model_pickles() -> None:
    model = build("Qwen3")
    model.config.distributed_config = _distributed_config(model, 2, 4)
    loaded = pickle.loads(pickle.dumps(model.config))
    assert (loaded.distributed_config.tp_size, loaded.distributed_config.dp_size) == (2, 4)
    copied = copy.deepcopy(model)
    assert copied.config.distributed_config.cut is copied


@pytest.mark.parametrize(("ranks", "tp"), [(2, 2), (4, 2)])
def test_trainer_trains_and_saves_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, tp: int
) -> None:
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": str(ranks)}.items():
        monkeypatch.setenv(name, value)  # as torchrun does, and accelerate wants; the group exists already
    [(numbers, weights)] = run_distributed(_alone, 1, str(tmp_path / "alone"))
    assert len(numbers["loss"]) == len(numbers["grad_norm"]) == STEPS
    assert min(numbers["grad_norm"]) > 0.5  # so clipping shows
    for names in run_distributed(_parallel, ranks, str(tmp_path), tp, numbers, weights):
        assert "model.safetensors" in names and "config.json" in names
