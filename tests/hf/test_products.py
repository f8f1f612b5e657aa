"""Linear layers of transformed models on a CPU whose MKL is slow: oneDNN makes fp32 products that are large enough."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import smp
from smp.kernels import matmul
from tests.distributed import run_distributed
from tests.kernels.test_matmul import Operators

transformers = pytest.importorskip("transformers")
CONFIG = transformers.LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    attention_bias=True,
)


def _step(model: Any, ids: torch.Tensor) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Loss and gradients, and whose products ran."""
    with Operators() as seen:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    whole = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()}
    return {"loss": loss.detach(), **whole}, seen.products()


def _compare(rank: int, world: int, loss: str) -> dict[str, Any]:
    """The model before and after ``transform``."""
    matmul.SLOW_MKL = matmul.COPIES_PAY = torch.backends.mkldnn.is_available()
    torch.manual_seed(0)
    alone = transformers.AutoModelForCausalLM.from_config(CONFIG)
    ids = torch.randint(0, 512, (4, 64))
    smp.init({"tensor_parallel_degree": world})
    model = smp.transform(copy.deepcopy(alone), loss=loss)
    (found, ours), (wanted, theirs) = _step(model, ids), _step(alone, ids)
    smp.state.reset()
    smp.init({"tensor_parallel_degree": 1})
    low = smp.transform(transformers.AutoModelForCausalLM.from_config(CONFIG).bfloat16())
    names = [name for name in wanted if "k_proj.bias" not in name]  # 0 but for rounding
    up = model.model.layers[0].mlp.up_proj
    return {
        "errors": {name: float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in names},
        "products": (ours, theirs),
        "own forward in bf16": any("forward" in vars(m) for m in low.modules() if type(m) is torch.nn.Linear),
        "report": "\n".join(map(str, model.smp_report)),
        "copied": world > 1 or copy.deepcopy(model).model.layers[0].mlp.up_proj.forward.args[0] is not up,
    }


def _replaced(rank: int, world: int) -> None:
    matmul.SLOW_MKL = matmul.COPIES_PAY = True
    smp.init({"tensor_parallel_degree": 1})
    model = smp.transform(transformers.AutoModelForCausalLM.from_config(CONFIG))
    layer, x = model.lm_head, torch.randn(64, 256)
    saved = pickle.loads(pickle.dumps(model.model.layers[0].mlp))
    assert torch.equal(saved(x), model.model.layers[0].mlp(x))
    calls, own = list[torch.nn.Linear](), torch.nn.Linear.forward

    def traced(self: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
        calls.append(self)
        return own(self, input)

    torch.nn.Linear.forward = traced  # type: ignore[method-assign]
    model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert len(calls) == sum(type(module) is torch.nn.Linear for module in model.modules())
    torch.nn.Linear.forward = own  # type: ignore[method-assign]
    layer.__class__ = type("Twice", (torch.nn.Linear,), {"forward": lambda self, input: 2 * own(self, input)})
    assert torch.equal(layer(x), 2 * own(layer, x))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_what_replaces_a_linear_layers_forward_pass_later_is_called() -> None:
    run_distributed(_replaced, 1)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
@pytest.mark.parametrize(("world", "loss"), [(1, "gathered"), (1, "chunked"), (2, "vocab_parallel"), (2, "chunked")])
def test_a_transformed_model_takes_onednn_and_is_equal(world: int, loss: str) -> None:
    for found in run_distributed(_compare, world, loss):
        assert max(found["errors"].values()) <= 1e-5, found["errors"]
        ours, theirs = found["products"]
        assert ours == {"oneDNN"} and theirs == {"torch"}
        assert ("by oneDNN" in found["report"]) == (world == 1) and found["copied"]
        assert not found["own forward in bf16"]
