"""What ``smp.transform`` refuses, in one line, before it touches anything."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from smp.config import ConfigError
from smp.hf.planning.module_plan import check_untouched, make_plan
from smp.hf.planning.rows import SUMMED
from smp.hf.planning.share import Share
from tests.hf import architectures
from tests.hf.families import FAMILIES, build

transformers = pytest.importorskip("transformers")
REPLICATED = {"model.layers.*.mlp.experts": "replicate"}


def tiny(config: str, **changes: object) -> nn.Module:
    values = {**FAMILIES["Llama"][1], **changes}
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**values))


@pytest.mark.parametrize(
    ("config", "changes", "tp", "rows", "message"),
    [
        ("LlamaConfig", {}, 3, None, "model.layers.0.self_attn: 4 heads are not divisible by tensor_parallel_degree 3"),
        ("LlamaConfig", {"intermediate_size": 66}, 4, None, "layers.0.mlp.gate_proj: 66 rows are not divisible by"),
        (
            "LlamaConfig",
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3},
            2,
            None,
            "k_proj: 3 key/value heads and tensor_parallel_degree 2: one must divide the other",
        ),
        (
            "LlamaConfig",
            {"attention_dropout": 0.1},
            2,
            None,
            "self_attn.attention_dropout is 0.1: dropout under tensor",
        ),
        (
            "LlamaConfig",
            {},
            2,
            {"model.layers.*.mlp.up_pro": "colwise"},
            "did you mean model.layers.*.mlp.up_proj",
        ),
        ("LlamaConfig", {}, 2, {"model.layers.*.mlp.up_proj": "column"}, "no style column"),
        ("LlamaConfig", {}, 2, {"model.layers.0.mlp": "replicate"}, "is for all layers: write model.layers.*.mlp"),
        ("LlamaConfig", {}, 2, {"model.layers.*.mlp": SUMMED}, "does nothing: the module has no parameters of its own"),
        (
            "LlamaConfig",
            {},
            2,
            {"model.layers.*.mlp": "replicate", "model.layers.*.mlp.up_proj": "colwise"},
            "mlp.up_proj does nothing, model.layers.*.mlp is replicated: leave one of the two out",
        ),
        ("LlamaConfig", {}, 2, {"model.norm": "colwise"}, "model.norm: colwise is for nn.Linear, this is LlamaRMSNorm"),
        ("LlamaConfig", {}, 2, {"model.layers.*.self_attn.heads": "divide"}, "self_attn.heads is None"),
        (
            "LlamaConfig",
            {"tie_word_embeddings": True},
            2,
            {"lm_head": "replicate"},
            "lm_head.weight and model.embed_tokens.weight are one parameter and would be cut in two ways",
        ),
        (
            "MixtralConfig",
            {"num_local_experts": 3},
            2,
            None,
            "mlp.experts: 3 experts are not divisible by tensor_parallel_degree 2; "
            'rows={"model.layers.*.mlp.experts": "replicate"} leaves it whole on every rank',
        ),
        ("MixtralConfig", {"num_local_experts": 3}, 2, REPLICATED, ""),
        ("MixtralConfig", {"router_jitter_noise": 0.1}, 2, None, "mlp.jitter_noise is 0.1: noise under"),
        ("MixtralConfig", {}, 2, {"model.layers.*.mlp.gate": "experts"}, "has not the interface experts("),
        ("ApertusConfig", {}, 2, None, ""),
        ("LlamaConfig", {"activation_dropout": 0.2}, 2, None, "config.activation_dropout is 0.2"),
        (
            "PhimoeConfig",
            {"router_jitter_noise": 0.0, "input_jitter_noise": 0.1},
            2,
            None,
            "mlp.input_jitter_noise is 0.1: noise under",
        ),
    ],
)
def test_what_would_not_be_equal_is_refused(
    config: str, changes: dict[str, object], tp: int, rows: dict[str, str] | None, message: str
) -> None:
    model = tiny(config, **changes)
    before = copy.deepcopy(model.state_dict())
    if message:
        with pytest.raises(ConfigError) as caught:
            make_plan(model, rows, tp, 0)
        assert message in str(caught.value) and "\n" not in str(caught.value)
    else:
        make_plan(model, rows, tp, 0)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_that_something_has_touched_is_refused() -> None:
    model = build("Llama")
    check_untouched(model)
    wrapped = copy.deepcopy(model)
    wrapped.lm_head.forward = lambda x: x
    with pytest.raises(ConfigError, match="lm_head: something has replaced its forward"):
        check_untouched(wrapped)
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)
    with pytest.raises(ConfigError, match=r"lm_head.weight has a gradient, which would be lost"):
        check_untouched(model)


@pytest.mark.parametrize("wrapper", ["FullyShardedDataParallel", "DistributedDataParallel"])
def test_a_wrapped_model_is_refused(wrapper: str) -> None:
    model: Any = type(wrapper, (nn.Module,), {})()
    model.module = build("Llama")
    with pytest.raises(ConfigError, match=f"the model is wrapped in {wrapper}: transform the model before"):
        check_untouched(model)


def test_a_model_whose_modules_a_wrapper_renamed_is_refused() -> None:
    model: Any = nn.Sequential(build("Llama"))  # as peft: other names, the same plan
    model.config, model._tp_plan = model[0].config, model[0]._tp_plan
    with pytest.raises(ConfigError, match="transform the model before a wrapper renames"):
        make_plan(model, None, 2, 0)


def test_quantized_models_are_refused() -> None:
    model = build("Llama")
    model.hf_quantizer = type("Bnb4BitHfQuantizer", (), {})()  # as from_pretrained(quantization_config=...) leaves it
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM is quantized \(Bnb4BitHfQuantizer\)") as refused:
        check_untouched(model)
    assert "\n" not in str(refused.value)
    model = build("Llama")
    model.model.layers[0].mlp.up_proj.__class__ = type("Linear", (nn.Linear,), {"__module__": "others.quantized"})
    with pytest.raises(ConfigError, match="up_proj: colwise is for nn.Linear, this is Linear of others.quantized"):
        make_plan(model, None, 2, 0)


def test_every_kind_of_dropout_is_refused() -> None:
    for kind in (nn.AlphaDropout, nn.Dropout1d):
        model = build("Llama")
        model.model.layers[0].mlp.act_fn = kind(0.1)
        with pytest.raises(ConfigError, match=r"layers.0.mlp.act_fn.p is 0.1: dropout under tensor"):
            make_plan(model, None, 2, 0)
        model.eval().model.layers[0].mlp.act_fn.train()
        with pytest.raises(ConfigError, match=r"layers.0.mlp.act_fn.p is 0.1: dropout under tensor"):
            make_plan(model, None, 2, 0)
        make_plan(model.eval(), None, 2, 0)


def test_the_plan_names_every_parameter_once() -> None:
    for family in FAMILIES:
        model = build(family)
        plan = make_plan(model, None, 2, 0)
        planned = {f"{name}.{own}" for name, step in plan.steps.items() for own in step.cuts}
        assert planned == {name for name, _ in model.named_parameters(remove_duplicate=False)}, family
        assert any(step.style.startswith("colwise") for step in plan.steps.values())


def test_how_much_is_cut_is_said_and_nothing_is_refused() -> None:
    llama, whole = tiny("LlamaConfig"), tiny("LlamaConfig")
    share = Share.of(llama, make_plan(llama, None, 2, 0))
    norms = sum(p.numel() for p in llama.parameters() if p.ndim == 1)
    assert (share.total - share.cut, share.total) == (norms, sum(p.numel() for p in llama.parameters()))
    share.check(llama, False)
    assert len(share.lines(2)) == 1
    assert f"a rank has {norms + share.cut // 2:,}" in share.lines(2)[0]
    share = Share.of(whole, make_plan(whole, {"model.layers": "replicate"}, 2, 0))
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM: nothing of model.layers.\* is cut"):
        share.check(whole, False)
    share.check(whole, True)
    assert "warning: less than a half is cut" in share.lines(2)[1]
    assert "nothing of model.layers.*" in share.lines(2)[1]


class _ReadsAGrandchild(transformers.LlamaForCausalLM):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(input_ids).last_hidden_state + self.model.embed_tokens.weight[0])


class _CallsAMethodOfOne(transformers.LlamaForCausalLM):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(input_ids).last_hidden_state * self.model.embed_tokens.weight.norm().item())


class _TakesItsData(transformers.LlamaForCausalLM):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(input_ids).last_hidden_state) + float(
            self.model.embed_tokens.weight.data.abs().max()
        )


class _OnlyItsKind(transformers.LlamaForCausalLM):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(input_ids).last_hidden_state.to(self.model.embed_tokens.weight.dtype))


@pytest.mark.parametrize("kind", [_ReadsAGrandchild, _CallsAMethodOfOne, _TakesItsData])
def test_a_table_that_a_forward_pass_reads_from_further_up_stays_whole(kind: Any) -> None:
    """And is lent to it; a row that cuts it is refused."""
    model = kind(build("Llama").config)
    plan = make_plan(model, None, 2, 0)
    assert plan.steps["model.embed_tokens"].style == "replicate"
    assert plan.borrowed[""] == ((model.model.embed_tokens, "weight"),)
    with pytest.raises(ConfigError, match=rf"model.embed_tokens: {kind.__name__} reads its weight, which is cut, from"):
        make_plan(model, {"model.embed_tokens": "embedding_rowwise"}, 2, 0)
    assert make_plan(_OnlyItsKind(model.config), None, 2, 0).steps["model.embed_tokens"].style == "embedding_rowwise"


def test_an_activation_with_parameters_needs_a_row() -> None:
    model = build("Llama")
    model.model.layers[0].mlp.act_fn = nn.PReLU()
    with pytest.raises(ConfigError, match=r"mlp.act_fn \(PReLU\) has parameters next to columns that are cut"):
        make_plan(model, None, 2, 0)
    steps = make_plan(model, {"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}, 2, 0).steps
    assert steps["model.layers.0.mlp.act_fn"].style == "replicated_with_grad_allreduce"


def test_numbers_for_each_head_are_cut() -> None:
    """Attention sinks, by a row of transformers' plan for the parameter."""
    model = architectures.build("granite_swa")
    step = make_plan(model, None, 2, 0).steps["model.layers.0.self_attn"]
    assert (step.style, step.cuts) == ("own parameters", {"sinks": 0})


def test_linear_layers_that_no_plan_names_are_cut() -> None:
    """With whole results; those of GPT-OSS's attention, which transformers' plan leaves whole, and of types that have
    no plan. A weight that a module reads of its child stays whole, and so do small ones."""
    model = tiny("GptOssConfig", head_dim=8, num_local_experts=4)
    plan = make_plan(model, None, 2, 0)
    styles = {name.partition("layers.0.")[2]: step.style for name, step in plan.steps.items()}
    assert {styles[f"self_attn.{name}_proj"] for name in "qkv"} == {"colwise_gather_output"}
    assert styles["self_attn.o_proj"] == "rowwise_split_input"
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1))
    steps = make_plan(mamba, None, 2, 0).steps
    assert steps["backbone.layers.0.mixer.in_proj"].style == "colwise_gather_output"
    assert steps["backbone.layers.0.mixer.dt_proj"].style == "replicate"
    with pytest.raises(ConfigError, match="Sequential has no tensor-parallel plan in transformers nor here"):
        make_plan(nn.Sequential(nn.Linear(4, 4)), None, 2, 0)
