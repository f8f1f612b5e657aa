"""Loops and models that are unlike Hugging Face's examples: equal to one process, or refused in one line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import smp
from smp.config import ConfigError
from smp.hf import guards
from smp.parallel.collectives import Group
from tests.distributed import run_distributed
from tests.hf.families import VOCAB, batch, build, whole, worst

pytest.importorskip("transformers")


def _custom() -> Any:
    """A subclass with parameters of its own, at the root too."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class WithValue(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.value = nn.Linear(config.hidden_size, 1)
            self.scale = nn.Parameter(torch.ones(config.hidden_size))
            self.post_init()

        def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **others: Any) -> Any:
            hidden = self.model(input_ids, attention_mask=attention_mask, **others).last_hidden_state * self.scale
            logits = self.lm_head(hidden)
            loss = self.loss_function(logits, labels, vocab_size=VOCAB) + self.value(hidden).square().mean()
            return CausalLMOutputWithPast(loss=loss, logits=logits)

    torch.manual_seed(5)
    return WithValue(LlamaConfig(**_SIZES))


_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class _Block(nn.Module):
    """What a script without transformers has: a table, one MLP, a dictionary of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.table(input_ids)
        return {"hidden": x + self.down(self.up(x).relu())}


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    model(**batch(1)).loss.backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def _losses_of_a_subclass() -> dict[str, float]:
    errors = {}
    for loss in ("gathered", "vocab_parallel", "chunked"):
        alone = _custom()
        model = smp.transform(copy.deepcopy(alone), loss=loss)
        errors[loss] = worst(_gradients(copy.deepcopy(model)), _gradients(alone))[0]
    return errors


def _scores(family: str) -> tuple[int, float]:
    """Layers, and how far the scores of all heads are from those of one process."""
    alone = build(family)
    alone.set_attn_implementation("eager")
    model = smp.transform(copy.deepcopy(alone))
    ids = batch(1)["input_ids"]
    wanted, found = (m(input_ids=ids, output_attentions=True).attentions for m in (alone, model))
    return len(found), max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def _with_dropout() -> float:
    """A model that drops in training only, as GPT-2 comes: how far its logits in evaluation are from one process's."""
    from transformers import GPT2Config, GPT2LMHeadModel

    alone = _seeded(lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4))).eval()
    model = smp.transform(copy.deepcopy(alone))
    ids = batch(1)["input_ids"]
    error = float((model(ids).logits - alone(ids).logits).abs().max())
    for set_to_train in (model.train, model.transformer.train, torch.compile(model, backend="eager").train):
        _refused("transformer.drop.p is 0.1: dropout under", set_to_train)
        model.eval()
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert copied.train().training and not model.training  # nothing drops in the copy any more
    return error


def _second_derivative(model: Any, ids: torch.Tensor) -> None:
    model(input_ids=ids, labels=ids).loss.backward()
    model(input_ids=ids, labels=ids).loss.backward(create_graph=True)


def _without_head(model: Any, ids: torch.Tensor) -> None:
    model.model(input_ids=ids)[0].sum().backward(create_graph=True)


def _of_what_a_hook_saw(model: Any, ids: torch.Tensor) -> None:
    seen: list[torch.Tensor] = []
    model.model.layers[0].register_forward_hook(lambda *given: seen.append(given[-1]))
    model(input_ids=ids)
    hidden = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    torch.autograd.grad(hidden.square().sum(), next(model.parameters()), create_graph=True)


def _refused(message: str, action: Callable[[], Any]) -> None:
    try:
        action()
    except ConfigError as error:
        assert message in str(error) and "\n" not in str(error), error
        return
    raise AssertionError(f"not refused: {message}")


def _unlike(rank: int, world_size: int) -> dict[str, Any]:
    from transformers import GenerationConfig

    smp.init({"tensor_parallel_degree": 2})
    alone = build("Llama").eval()
    model = smp.transform(copy.deepcopy(alone)).eval()
    unused = copy.deepcopy(model)
    ids = batch(1)["input_ids"][1:]
    _refused("input_ids differs between ranks 0 and 1", lambda: copy.deepcopy(model)(input_ids=ids + rank))
    _refused("labels differs between ranks 0 and 1", lambda: copy.deepcopy(model)(input_ids=ids, labels=ids + rank))
    sampled = {"input_ids": ids, "max_new_tokens": 6, "do_sample": True, "eos_token_id": None}
    torch.manual_seed(rank)
    _refused("would draw different tokens", lambda: model.generate(**sampled))
    by_place = GenerationConfig(max_new_tokens=6, do_sample=True)
    _refused("would draw different tokens", lambda: model.generate(ids, by_place))
    assert model.generate(**sampled | {"do_sample": False}).shape[1] == ids.shape[1] + 6  # nothing is drawn
    texts = []
    for one in (alone, model):
        torch.manual_seed(3)
        texts.append(one.generate(**sampled))
    _refused("would draw different tokens", lambda: _with_weights_off_the_device(copy.deepcopy(model), rank, sampled))
    _refused("a model (nn.Module), not str", lambda: smp.transform("gpt2"))
    _refused("a torch.dtype, such as torch.bfloat16", lambda: smp.transform(build("Llama"), dtype="bf16"))
    _refused("a dictionary of styles", lambda: smp.transform(build("Llama"), rows=["up"]))
    _refused("DistributedDataParallel does not know of the cut", lambda: DistributedDataParallel(copy.deepcopy(model)))
    _refused("wrapped in DataParallel", lambda: smp.transform(nn.DataParallel(build("Llama"))))
    _refused("the model, not its parameters", lambda: smp.clip_grad_norm_(model.parameters(), 1.0))
    rows = {"up": "colwise", "down": "rowwise"}
    smp.transform(_seeded(_Block), rows=rows)  # compares itself
    _refused("create_graph=True: layers that exchange tensors", lambda: _second_derivative(copy.deepcopy(model), ids))
    _refused("create_graph=True: layers that exchange tensors", lambda: _without_head(copy.deepcopy(model), ids))
    _refused("create_graph=True: layers that exchange tensors", lambda: _of_what_a_hook_saw(copy.deepcopy(model), ids))
    chunked = smp.transform(build("Llama"), loss="chunked")
    _refused("create_graph=True: layers that exchange tensors", lambda: _second_derivative(chunked, ids))
    _refused("without return_dict=False", lambda: model(input_ids=ids, output_attentions=True, return_dict=False))
    for kind in (torch.optim.Adafactor, transformers_adafactor, type("Own", (torch.optim.Adafactor,), {})):
        step = partial(_step_of, kind, copy.deepcopy(model), ids)
        _refused("Adafactor divides by means over the rows", step)
    _parts_load_whole_tensors(copy.deepcopy(model), alone)
    found = {
        "subclass": _losses_of_a_subclass(),
        "scores": [_scores(family) for family in ("Llama, one key/value head, tied", "Phi 3")],
        "dropout": _with_dropout(),
        "texts": bool(torch.equal(*texts)),
        "through memory": smp.state.tp_process_group.counts["memory all-reduce"],
    }
    _after_another_init(unused, alone, ids, rank)
    return found


def _with_weights_off_the_device(model: Any, rank: int, sampled: dict[str, Any]) -> None:
    """It computes on GPUs, whose random states differ, while its weights are on the CPU, where these are equal."""
    guards.install(model, Group.of(smp.state.tp_mesh), "cuda")
    torch.manual_seed(3)
    gpu = SimpleNamespace(get_rng_state=lambda: torch.tensor([rank], dtype=torch.uint8))
    with mock.patch.object(torch, "get_device_module", lambda device: gpu):
        model.generate(**sampled)


def transformers_adafactor(parameters: Any, lr: float) -> Any:
    from transformers import Adafactor

    return Adafactor(parameters, lr=lr, relative_step=False, scale_parameter=False)


def _step_of(kind: Callable[..., Any], model: Any, ids: torch.Tensor) -> None:
    optimizer = kind(model.parameters(), lr=1e-2)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def _parts_load_whole_tensors(model: Any, alone: Any) -> None:
    """The model without its head, a layer, a matrix: each by itself."""
    for name in ("model", "model.layers.1", "model.layers.0.mlp.down_proj"):
        part, whole = model.get_submodule(name), alone.get_submodule(name)
        doubled = {key: 2 * tensor for key, tensor in whole.state_dict().items()}
        part.load_state_dict(doubled)
        assert all(torch.equal(own.full_tensor(), doubled[key]) for key, own in part.named_parameters()), name
        part.load_state_dict(whole.state_dict())


def _after_another_init(model: Any, alone: Any, ids: torch.Tensor, rank: int) -> None:
    """A model keeps its ranks, whatever is divided anew."""
    smp.state.reset()
    expected = alone(ids).logits
    assert float((copy.deepcopy(model)(ids).logits - expected).abs().max()) <= 1e-5
    smp.init({"tensor_parallel_degree": 1})
    other = copy.deepcopy(model)
    _refused("input_ids differs between ranks 0 and 1", lambda: other(input_ids=ids + rank))
    torch.manual_seed(rank)
    _refused("would draw different tokens", lambda: other.generate(ids, max_new_tokens=6, do_sample=True))
    assert float((model(ids).logits - expected).abs().max()) <= 1e-5


def _seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(5)
    return make()


def test_unlike_the_examples() -> None:
    for found in run_distributed(_unlike, 2):
        assert max(found["subclass"].values()) <= 1e-5, found
        assert all(layers == 2 and error <= 1e-6 for layers, error in found["scores"]), found
        assert found["through memory"] > 0  # not over gloo
        assert found["texts"] and found["dropout"] <= 1e-6, found
