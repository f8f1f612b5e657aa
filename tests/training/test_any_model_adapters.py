"""Adapters that are read, have dropout or lie on weights in 4 bits, and reward models, on modules of transformers: as
in plain loops with peft and transformers, in every layout."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smp.config import ConfigError
from smp.hf.products import take_product
from smp.hf.run.lora import TokenNumbers, offer
from smp.kernels.dropout import keyed_dropout
from smp.kernels.precision import nf4
from smp.layers.adapters.lora import adaptable
from smp.layers.adapters.quantized import quantize_layers
from smp.models.foreign import new_module
from smp.models.micro_batch import MicroBatch
from smp.parallel.rng import dropout_key
from smp.training.tuning.settings import read_finetune_settings
from tests.distributed import run_distributed
from tests.hf.architectures import tiny
from tests.parity.result import TOLERANCE
from tests.training.any_model_lab import LR, largest_error, load, train_plainly, tune_types, write_type
from tests.training.tiny_hf import write_adapter
from tests.training.tuning_lab import together
from tools.convert_checkpoint import main as convert

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 64}
COMMON = (
    "--seq-length 48 --micro-batch-size 2 --global-batch-size 8 --optimizer sgd --weight-decay 0 --train-iters 3 "
    "--model-implementation transformers --packing off --lr"
)
CASES = {
    "dropout": "0.1 --data-path {0}/sft.jsonl --lora-rank 4 --lora-dropout 0.3",
    "loaded": "0.1 --data-path {0}/sft.jsonl --load-adapter {0}/start",
    "4 bits": "0.1 --data-path {0}/sft.jsonl --lora-rank 4 --load-in-4bit",
    "4 bits, DoRA": "0.1 --data-path {0}/sft.jsonl --lora-rank 4 --load-in-4bit --use-dora",
    "reward": f"{LR} --data-path {{0}}/dpo.jsonl --objective reward",
    "reward, LoRA": "0.1 --data-path {0}/dpo.jsonl --objective reward --lora-rank 4",
}
SAVED = ("dropout", "4 bits", "reward", "reward, LoRA")
LAYOUTS = {
    "recompute": (1, "--recompute-granularity full", ("dropout",)),
    "tp 2": (2, "--tensor-model-parallel-size 2", ("dropout",)),
    "tp 2 + sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel", tuple(CASES)),
    "shard 2": (2, "", ("dropout", "4 bits, DoRA", "reward, LoRA")),
}
Runs = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_type(tmp_path_factory.mktemp("adapters") / "helium", "helium", num_key_value_heads=2, **SIZES)
    write_adapter(made, made / "start", r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"])
    return made


def flags_of(folder: Path, case: str, more: str = "") -> str:
    return f"--load {folder} --log-dir {folder}/logs {COMMON} {CASES[case].format(folder)} {more}"


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    saved = {case: f"--save {folder}/{case.replace(', ', '-').replace(' ', '-')}" for case in SAVED}
    cases = [("alone", case, flags_of(folder, case, saved.get(case, ""))) for case in CASES]
    cases += [(name, c, flags_of(folder, c, words)) for name, (n, words, of) in LAYOUTS.items() if n == 1 for c in of]
    out: Runs = {}
    for layout, case, result in _run(1, cases):
        out[layout, case] = result
    cases = [(name, c, flags_of(folder, c, words)) for name, (n, words, of) in LAYOUTS.items() if n == 2 for c in of]
    for layout, case, result in _run(2, cases):
        out[layout, case] = result
    return out


def _run(world: int, cases: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, dict[str, Any]]]:
    ranks = run_distributed(tune_types, world, [flags for _, _, flags in cases])
    assert not [r["refused"] for r in ranks[0] if "refused" in r]
    return [(layout, case, together([r[i] for r in ranks])) for i, (layout, case, _) in enumerate(cases)]


@pytest.mark.parametrize("case", CASES)
def test_every_layout_equals_one_process(runs: Runs, case: str) -> None:
    alone = runs["alone", case]
    assert len(set(alone["losses"])) == 3
    for layout in (name for name, (_, _, of) in LAYOUTS.items() if case in of):
        errors = largest_error(runs[layout, case], alone)
        assert max(errors.values()) <= TOLERANCE, (layout, errors)


def with_adapter(model: Any, adapter: Path, start: dict[str, torch.Tensor]) -> Any:
    """``model`` with peft's adapter of a folder, whose factors are those that a run began with."""
    made = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    for name, parameter in made.named_parameters():
        own = re.sub(r"\.lora_([AB])\.default\.weight$", lambda of: f".lora.{of[1].lower()}", name)
        if own != name:
            parameter.data.copy_(start[own.removeprefix("base_model.model.")])
    return made.train()


def agree(got: dict[str, Any], want: dict[str, Any]) -> None:
    for key in ("losses", "norms"):
        assert got[key] == pytest.approx(want[key], rel=TOLERANCE)


def test_an_adapter_of_peft_goes_on_as_by_peft(runs: Runs, folder: Path) -> None:
    run = runs["alone", "loaded"]
    model = peft.PeftModel.from_pretrained(load(folder), folder / "start", is_trainable=True)
    agree(run, train_plainly(model.train(), run["batches"], 0.1))
    assert {name.split(".")[-3] for name in run["initial"]} == {"q_proj", "down_proj"}


class Keyed(nn.Module):
    """The dropout of a layer, by the numbers of the tokens."""

    def __init__(self, name: str, numbers: list[torch.Tensor]) -> None:
        super().__init__()
        self.key, self.numbers = torch.tensor(dropout_key(1234, f"{name}.lora")), numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return keyed_dropout(x[0], self.key, self.numbers[-1], 0.3)[None]


def test_dropout_is_that_of_peft_by_masks_of_its_own(runs: Runs, folder: Path) -> None:
    run, numbers = runs["alone", "dropout"], list[torch.Tensor]()
    assert json.loads((folder / "dropout/adapter/adapter_config.json").read_text())["lora_dropout"] == 0.3
    model = with_adapter(load(folder), folder / "dropout/adapter", run["initial"])
    for name, module in model.named_modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = Keyed(name.removeprefix("base_model.model."), numbers)
    # numbers of the tokens of each document, in the order in which the plain loop asks for them
    queue = [
        batch.token_index[row][: int(batch.loss_weights[row].nonzero().max()) + 1]
        for step in run["batches"]
        for batch in step
        for row in range(len(batch.input_ids))
        if batch.loss_weights[row].any()
    ]
    model.register_forward_pre_hook(lambda *_: numbers.append(queue.pop(0)))
    agree(run, train_plainly(model, run["batches"], 0.1))
    assert not queue


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """What is computed with of a weight that rests in 4 bits."""
    halves, scales = nf4.quantize(weight)
    return nf4.widen(nf4.pack(halves, scales, scales, (0, 0)), torch.float32, double=True)


def test_weights_in_4_bits_are_those_of_the_rounded_model(runs: Runs, folder: Path) -> None:
    run, model = runs["alone", "4 bits"], load(folder)
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.copy_(rounded(module.weight.data))
    model = with_adapter(model, folder / "4-bits/adapter", run["initial"])
    agree(run, train_plainly(model, run["batches"], 0.1))


def scores(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Of each row of a micro-batch by itself."""
    assert batch.loss_weights is not None
    lengths = [int(weights.nonzero().max()) + 1 for weights in batch.loss_weights]
    rows = zip(batch.input_ids, lengths, strict=True)
    return torch.stack([model(input_ids=ids[None, :n], use_cache=False).logits.view(()) for ids, n in rows])


def reward_loop(model: Any, steps: Sequence[Sequence[MicroBatch]], lr: float) -> dict[str, Any]:
    """Bradley-Terry losses on transformers' classifier, plain SGD."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses, norms = torch.optim.SGD(trained, lr=lr), [], []
    for step in steps:
        pairs = sum(len(batch.input_ids) // 2 for batch in step)
        for batch in step:
            found = scores(model, batch)
            (-F.logsigmoid(found[::2] - found[1::2]).sum() / pairs).backward()
            losses.append(-F.logsigmoid(found[::2] - found[1::2]).sum().item() / pairs)
        losses[-len(step) :] = [sum(losses[-len(step) :])]
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None]).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


def classifier(folder: Path, score: torch.Tensor | None = None) -> Any:
    """transformers' reward model of a folder; without padding its last token is the last of the text."""
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = None
    if score is not None:
        model.score.weight.data.copy_(score)
    return model


def test_a_reward_model_is_that_of_transformers(runs: Runs, folder: Path) -> None:
    run = runs["alone", "reward"]
    agree(run, reward_loop(classifier(folder, run["initial"]["score.weight"]).train(), run["batches"], LR))
    assert convert(["--load", f"{folder}/reward", "--save", f"{folder}/exported"]) == 0
    exported = classifier(folder / "exported")
    assert exported.config.architectures == ["HeliumForSequenceClassification"] and exported.config.num_labels == 1
    for name, tensor in exported.state_dict().items():
        if name in run["final"]:
            assert torch.equal(tensor, run["final"][name]), name
    again = flags_of(folder, "reward").replace(f"--load {folder} ", f"--load {folder}/exported ")
    config, _ = read_finetune_settings(again.split(), 1)
    assert config.model.scalar_head
    with pytest.raises(ConfigError, match="is a reward model, without an output matrix: give --objective reward"):
        read_finetune_settings(again.replace("--objective reward", "").replace("dpo", "sft").split(), 1)


def test_adapters_of_a_reward_model_have_its_head(runs: Runs, folder: Path) -> None:
    run, adapter = runs["alone", "reward, LoRA"], folder / "reward-LoRA/adapter"
    made = peft.PeftModel.from_pretrained(classifier(folder), adapter)
    [score] = [p for name, p in made.named_parameters() if name.endswith("score.modules_to_save.default.weight")]
    assert torch.equal(score, run["final"]["score.weight"]) and not torch.equal(score, run["initial"]["score.weight"])


def test_adapters_of_other_models_are_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "start/adapter_model.safetensors"
    tensors = load_file(file)
    key = next(iter(tensors))
    for edit, said in {
        "strange": "is no linear layer of this model",
        "less": "which its target_modules choose: it belongs to another model",
    }.items():
        changed = {name: tensor for name, tensor in tensors.items() if key.rpartition(".lora_")[0] not in name}
        if edit == "strange":
            changed |= {name.replace("q_proj", "z_proj"): tensor.clone() for name, tensor in tensors.items()}
        (tmp_path / edit).mkdir()
        (tmp_path / edit / "adapter_config.json").write_bytes((folder / "start/adapter_config.json").read_bytes())
        save_file(changed, tmp_path / edit / "adapter_model.safetensors")
        flags = flags_of(folder, "loaded").replace(f"{folder}/start", str(tmp_path / edit))
        [result] = run_distributed(tune_types, 1, [flags])[0]
        assert said in result["refused"]


OFFERED = {
    "bamba": {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "gate_proj", "up_proj", "down_proj"},
    "falcon_h1": {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "gate_proj", "up_proj", "down_proj"},
    "falcon_mamba": {"in_proj"},
    "bloom": {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
    "t5": {"q", "k", "v", "o", "wi", "wo"},
}


@pytest.mark.parametrize("kind", OFFERED)
def test_layers_whose_weights_are_read_past_them_take_no_adapter(kind: str) -> None:
    """As in peft's issue 2556: fused kernels, and some products, read them, and an adapter would do nothing."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    module = new_module(tiny(CONFIG_MAPPING[kind]).to_json_string(use_diff=False))
    mesh: Any = None  # of no use before one is attached
    offer(module, mesh, TokenNumbers())
    found = {name.rpartition(".")[2]: layer for name, layer in adaptable(module).items()}
    assert found.keys() == OFFERED[kind]
    # T5 casts what ``wo`` reads to the dtype of its weight, and packed weights have another one.
    assert {name for name, layer in found.items() if not hasattr(layer, "take_product")} == {"wo"} & found.keys()


def test_a_model_of_which_nothing_can_rest_in_4_bits_is_refused() -> None:
    layer: Any = nn.Linear(nf4.BLOCK + 2, 4)
    layer.take_product, layer.product = partial(take_product, layer), "dense"
    with pytest.raises(ConfigError, match="--load-in-4bit: no linear layer has rows of whole blocks of 64 elements"):
        quantize_layers(nn.Sequential(layer), double=True)
