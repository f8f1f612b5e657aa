"""Optimizers and clipping over sharded parameters against plain torch on whole ones."""

from __future__ import annotations

import copy
import logging
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smp.config import ConfigError, Layout, ModelConfig, OptimizerConfig, ParallelConfig
from smp.layers import GatedDeltaNet, init_weights
from smp.layers.heads.score import ScoreHead
from smp.models.gpt import GPT
from smp.optim import optimizer as optimizer_module
from smp.optim.low_precision import MOMENTS, LowPrecisionAdamW, _rows
from smp.optim.muon import matrices_of
from smp.optim.optimizer import build_optimizer, clip_gradients, set_learning_rate
from smp.parallel.context import build_context
from smp.parallel.dtensor_region import local_part, local_region
from smp.sharding.parallelize import parallelize
from tests.distributed import run_distributed
from tests.fake_group import fake_context

MODEL = ModelConfig(  # biases, norms, positions and shards of uneven size
    num_layers=1,
    hidden_size=6,
    ffn_hidden_size=8,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=4,
    vocab_size=32,
    make_vocab_size_divisible_by=8,
    max_position_embeddings=5,
    normalization="LayerNorm",
    swiglu=False,
    position_embedding_type="learned_absolute",
    disable_bias_linear=False,
)
ADAM = OptimizerConfig(lr=0.1, weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-3)
OPTIMIZERS = {
    "adam": ADAM,
    "apex-adam": replace(ADAM, optimizer="apex-adam"),
    "sgd": replace(ADAM, optimizer="sgd", sgd_momentum=0.5),
}
LAYOUTS = {
    "tp 4": Layout(tp=4),
    "shard 4": Layout(dp_shard=4),
    "shard 2 x tp 2": Layout(dp_shard=2, tp=2),
    "replicate 2 x shard 2": Layout(dp_replicate=2, dp_shard=2),
    "replicate 2 x tp 2": Layout(dp_replicate=2, tp=2),
}
KINDS = {"shard 2 x tp 2": tuple(OPTIMIZERS)}  # elsewhere adam alone
RATES = (0.1, 0.03, 0.2)
CLIP = (0.0, 5.0, 1e4)  # measure only, bite, leave alone


def build(context: Any, layout: Layout) -> GPT:
    model = GPT(MODEL, context.tp)
    parallelize(model, context, ParallelConfig(layout.tp, hybrid_shard_degree=layout.dp_shard))
    model.to_empty(device="cpu")
    init_weights(model, seed=0)
    return model


def whole_gradients(model: nn.Module, step: int) -> list[torch.Tensor]:
    """The same in every layout; of very different sizes, as those of real models are."""
    generator = torch.Generator().manual_seed(step)
    return [10.0 ** (i % 4 - 2) * torch.randn(p.shape, generator=generator) for i, p in enumerate(model.parameters())]


def set_gradients(model: nn.Module, wholes: list[torch.Tensor]) -> None:
    for p, part in zip(model.parameters(), wholes, strict=True):
        assert isinstance(p, DTensor)
        region = local_region(p)
        for dim, (start, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
            part = part.narrow(dim, start, size)
        p.grad = DTensor.from_local(
            part.clone(), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor().clone()  # type: ignore[operator]


def train(model: GPT, config: OptimizerConfig) -> dict[str, Any]:
    """Three steps: the norms, the clipped gradients and the final weights, whole."""
    optimizer = build_optimizer(model, config, None)
    norms, clipped = [], []
    for step, (rate, clip) in enumerate(zip(RATES, CLIP, strict=True)):
        set_gradients(model, whole_gradients(model, step))
        norms.append(clip_gradients(model.parameters(), clip).item())
        clipped += [whole(p.grad) for p in model.parameters() if p.grad is not None]
        set_learning_rate(optimizer, rate)
        optimizer.step()
        optimizer.zero_grad()
        assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
        states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.ndim]
        assert all(isinstance(t, DTensor) for t in states) and len(states) > 0
    return {"norms": norms, "clipped": clipped, "weights": [whole(p) for p in model.parameters()]}


def reference(config: OptimizerConfig) -> dict[str, Any]:
    """Plain torch on whole tensors."""
    with fake_context() as context:
        weights = [nn.Parameter(whole(p)) for p in build(context, Layout()).parameters()]
    groups = [
        {"params": [w for w in weights if w.ndim > 1], "weight_decay": 0.3},
        {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0},
    ]
    if config.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, momentum=0.5)
    else:
        optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-3)
    norms, clipped, shapes = [], [], nn.ParameterList(weights)
    for step, (rate, clip) in enumerate(zip(RATES, CLIP, strict=True)):
        for w, gradient in zip(weights, whole_gradients(shapes, step), strict=True):
            w.grad = gradient
        norms.append(nn.utils.clip_grad_norm_(weights, clip or float("inf")).item())
        clipped += [w.grad.clone() for w in weights if w.grad is not None]
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return {"norms": norms, "clipped": clipped, "weights": [w.detach() for w in weights]}


class FakeFusedAdam(torch.optim.Optimizer):
    """Stands in for apex's: same arguments, and it works on the memory of plain tensors only."""

    def __init__(self, params: Any, lr: float, betas: Any, eps: float, adam_w_mode: bool, weight_decay: float = 0.0):
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                tensors = [p.data, p.grad, state["exp_avg"], state["exp_avg_sq"]]
                assert not any(isinstance(t, DTensor) for t in [p, *tensors])
                adam_(*tensors, group)


def adam_(w: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, group: dict[str, Any]) -> None:
    (beta1, beta2), step = group["betas"], group["step"]
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + group["eps"])
    w.sub_(group["lr"] * (update + group["weight_decay"] * w))


def install_fake_apex(patch: pytest.MonkeyPatch) -> None:
    apex, optimizers = types.ModuleType("apex"), types.ModuleType("apex.optimizers")
    optimizers.FusedAdam = FakeFusedAdam  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "apex", apex)
    patch.setitem(sys.modules, "apex.optimizers", optimizers)


def train_layouts(rank: int, world: int) -> dict[tuple[str, str], dict[str, Any]]:
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # full_tensor in two steps: fine here
    out = {}
    with pytest.MonkeyPatch.context() as patch:
        install_fake_apex(patch)
        for name, layout in LAYOUTS.items():
            context = build_context(layout, "cpu")
            for kind in KINDS.get(name, ("adam",)):
                out[name, kind] = train(build(context, layout), OPTIMIZERS[kind])
    return out


@pytest.fixture(scope="module")
def trained() -> list[dict[tuple[str, str], dict[str, Any]]]:
    return run_distributed(train_layouts, 4)


def errors(got: list[torch.Tensor], want: list[torch.Tensor]) -> list[float]:
    return [((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_layout_trains_and_clips_like_plain_torch(trained: list[Any], kind: str) -> None:
    want = reference(OPTIMIZERS[kind])
    assert want["norms"][1] > CLIP[1] and want["norms"][2] < CLIP[2]
    for place, first in trained[0].items():
        for got in [ranks[place] for ranks in trained if place[1] == kind]:
            assert got["norms"] == first["norms"], "ranks disagree"
            assert got["norms"] == pytest.approx(want["norms"], rel=1e-6)
            assert max(errors(got["clipped"], want["clipped"])) <= 1e-6
            assert max(errors(got["weights"], want["weights"])) <= 2e-6


def test_one_rank_trains_and_clips_like_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_apex(monkeypatch)
    for config in OPTIMIZERS.values():
        want = reference(config)
        with fake_context() as context:
            got = train(build(context, Layout()), config)
        assert got["norms"] == pytest.approx(want["norms"], rel=1e-6)
        assert max(errors(got["clipped"], want["clipped"])) <= 1e-6
        assert max(errors(got["weights"], want["weights"])) <= 2e-6


def test_biases_and_norms_do_not_decay() -> None:
    with fake_context() as context:
        model = build(context, Layout())
        groups = build_optimizer(model, ADAM, context.fsdp).param_groups
        names = {id(p): name for name, p in model.named_parameters()}
    decayed, kept = ({names[id(p)] for p in group["params"]} for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert kept == {name for name in names.values() if name.endswith("bias") or "norm" in name}
    assert decayed == set(names.values()) - kept
    assert {"embedding.weight", "positions.weight", "head.weight"} < decayed


def test_frozen_parameters_are_left_out() -> None:
    with fake_context() as context:
        model = build(context, Layout())
        model.requires_grad_(False)
        model.final_norm.requires_grad_()
        [group] = build_optimizer(model, ADAM, context.fsdp).param_groups
    assert group["weight_decay"] == 0.0 and len(group["params"]) == 2


def test_apex_state_survives_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded continues like what was saved."""
    install_fake_apex(monkeypatch)
    with fake_context() as context:
        models = [build(context, Layout()) for _ in range(2)]
        first, second = (build_optimizer(model, OPTIMIZERS["apex-adam"], context.fsdp) for model in models)
        set_gradients(models[0], whole_gradients(models[0], 0))
        first.step()
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        models[1].load_state_dict(models[0].state_dict())
        for model, optimizer in zip(models, (first, second), strict=True):
            set_gradients(model, whole_gradients(model, 1))
            optimizer.step()
        assert all(torch.equal(whole(a), whole(b)) for a, b in zip(*(m.parameters() for m in models), strict=True))


def test_apex_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)
    with fake_context() as context, pytest.raises(ConfigError, match="--optimizer apex-adam needs apex"):
        build_optimizer(build(context, Layout()), OPTIMIZERS["apex-adam"], context.fsdp)


def test_a_model_that_is_not_parallelized_is_refused() -> None:
    with fake_context(Layout(dp_shard=2)) as context:
        for model in (nn.Linear(2, 2), GPT(MODEL, context, device="cpu")):
            with pytest.raises(ValueError, match="build the optimizer after parallelize"):
                build_optimizer(model, ADAM, context.fsdp)


def test_one_rank_needs_no_fsdp_and_any_module_will_do() -> None:
    with fake_context() as context:
        for model in (nn.Linear(2, 2), GPT(MODEL, context, device="cpu")):
            optimizer = build_optimizer(model, ADAM, context.fsdp)
            assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_a_model_that_is_gathered_is_refused() -> None:
    """After a forward pass in evaluation the root unit stays gathered, and its parameters are about to be replaced."""
    layout = Layout(dp_shard=2)
    with fake_context(layout) as context:
        model = build(context, layout)
        model.unshard()
        with pytest.raises(ValueError, match="is gathered"):
            build_optimizer(model, ADAM, context.fsdp)
        model.reshard()
        build_optimizer(model, ADAM, context.fsdp)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=2), Layout(dp_replicate=2)])
def test_the_first_step_refuses_parameters_that_the_model_does_not_have(layout: Layout) -> None:
    """However they came to be others: those of the optimizer would be updated, and the model would stay as it is."""
    with fake_context(layout) as context:
        for replaced, said in (
            (True, "final_norm.weight is not the parameter"),
            (False, "1 parameters that the model"),
        ):
            model = build(context, layout)
            optimizer = build_optimizer(model, ADAM, context.fsdp)
            old = model.final_norm.weight
            model.final_norm.weight = nn.Parameter(old.detach().clone(), requires_grad=replaced)
            with pytest.raises(ValueError, match=said):
                optimizer.step()
            model.final_norm.weight = old
            optimizer.step()


def test_the_first_step_refuses_gathered_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second look catches alone what the first one is there for."""
    layout = Layout(dp_shard=2)
    monkeypatch.setattr(optimizer_module, "_check_sharded", lambda *_: None)
    with fake_context(layout) as context:
        model = build(context, layout)
        model.unshard()
        optimizer = build_optimizer(model, ADAM, context.fsdp)
        model.reshard()
        with pytest.raises(ValueError, match="is not the parameter that the optimizer was built with"):
            optimizer.step()


def test_parameters_without_a_gradient_do_not_count() -> None:
    with fake_context() as context:
        model = build(context, Layout())
        assert clip_gradients(model.parameters(), 1.0).item() == 0.0
        set_gradients(model, whole_gradients(model, 0))
        want = model.final_norm.weight.grad.to_local().norm()
        for name, p in model.named_parameters():
            if name != "final_norm.weight":
                p.grad = None
        assert clip_gradients(model.parameters(), 0.0).item() == pytest.approx(want.item())


def test_apex_without_its_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_apex(monkeypatch)

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("FusedAdam requires cuda extensions")

    monkeypatch.setattr(sys.modules["apex.optimizers"].FusedAdam, "__init__", refuse)
    with fake_context() as context, pytest.raises(ConfigError, match="apex-adam: FusedAdam requires cuda extensions"):
        build_optimizer(build(context, Layout()), OPTIMIZERS["apex-adam"], context.fsdp)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_a_skipped_step_leaves_moments_in_few_bits_alone(kind: str) -> None:
    """What is widened and rounded back keeps its value, also by other random bits; a real step changes all."""
    config = replace(ADAM, exp_avg_dtype=kind, exp_avg_sq_dtype=kind)
    with fake_context() as context:
        model = build(context, Layout())
        optimizer = build_optimizer(model, config, context.fsdp, seed=3)
        set_gradients(model, whole_gradients(model, 0))
        optimizer.step()

        def state() -> list[torch.Tensor]:
            assert isinstance(optimizer, LowPrecisionAdamW)
            values = [s["step"].clone() for s in optimizer.state.values()]
            for p, s in optimizer.state.items():  # a value may have two forms: 448 x 1 is 224 x 2
                parts = {key: _rows(local_part(t)) for key, t in s.items() if key != "step"}
                values += [optimizer._widened(p, name, parts, slice(None)).clone() for name in MOMENTS]
            return [*values, *(whole(p) for p in model.parameters())]

        before = state()
        set_gradients(model, whole_gradients(model, 1))
        optimizer_module.step_on_device_if(torch.tensor(False), optimizer)
        assert all(torch.equal(a, b) for a, b in zip(state(), before, strict=True))
        optimizer_module.step_on_device_if(torch.tensor(True), optimizer)
        assert not any(torch.equal(a, b) for a, b in zip(state()[-4:], before[-4:], strict=True))


def test_muon_leaves_the_output_matrix_of_a_hugging_face_model_alone() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    chosen = matrices_of(model)
    assert model.lm_head.weight not in chosen and model.model.embed_tokens.weight not in chosen
    assert model.model.layers[0].mlp.up_proj.weight in chosen
    assert matrices_of(model.model) == chosen, "without an output matrix"


def test_muon_leaves_the_head_of_a_reward_model_alone() -> None:
    """A row in place of the output matrix: orthogonalized, its update would have one length whatever the gradient."""
    with fake_context(Layout()) as context:
        score = ScoreHead(8, context)
        model = nn.Sequential(nn.Linear(8, 8), score)
    assert matrices_of(model) == {model[0].weight}


def test_muon_leaves_kernels_of_convolutions_alone() -> None:
    """A few numbers for each channel: orthogonalized, channels would mix."""
    with fake_context(Layout()) as context:
        net = GatedDeltaNet(8, 1, 2, context, key_dim=4, value_dim=4)
    left = {name for name, p in net.named_parameters() if p not in matrices_of(net)}
    assert left == {"query_conv", "key_conv", "value_conv", "decay_log", "decay_bias", "norm.weight"}
    assert matrices_of(nn.Sequential(nn.Conv1d(4, 4, 3, groups=4))) == set()
