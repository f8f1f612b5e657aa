"""torch_dist checkpoints: megatron-core loads ours and computes what we compute, and we load what it writes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.config import ConfigError, Layout, ModelConfig
from smp.convert.formats import open_checkpoint
from smp.convert.huggingface.config import architecture
from smp.convert.megatron.table import padded_vocab
from tests.convert import megatron_core
from tests.convert.conversion import convert
from tests.convert.test_hf import assert_same_tensors
from tests.convert.tiny import DELTA_RULES, EXPERTS, HYBRID, SCALED, STATE_SPACE, TINY, save_theirs
from tests.distributed import run_distributed

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")
WRITABLE_SCALED = ("smollm3", "glm", "starcoder2")
"""Of those with scales, caps, norms or layers of their own: layers without RoPE, interleaved RoPE, biases."""
REFUSED = ("llama3.1", "qwen2-yarn", "qwen3-yarn", "neox", "neox-linear", "neox-serial")
REFUSED += ("llama-attention-bias", "llama-mlp-bias", "llama-dynamic")
REFUSED += tuple(kind for kind in (*SCALED, *HYBRID, *STATE_SPACE, *DELTA_RULES) if kind not in WRITABLE_SCALED)
WRITABLE_EXPERTS = ("mixtral", "qwen2-moe", "glm4-moe-groups")
"""Those with experts in every layer, and a norm of each head if they have one."""
KINDS = [kind for kind in TINY if kind not in REFUSED and (kind not in EXPERTS or kind in WRITABLE_EXPERTS)]
COMPARED = [
    kind for kind in KINDS if kind not in ("mistral", "starcoder2", "llama-bias", "llama-mqa", *WRITABLE_EXPERTS)
]
"""megatron-core's layers without Transformer Engine have no sliding window, and its ranks share no key/value head;
llama-bias is near qwen2 and gpt2."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_long_way_round_keeps_every_bit(kind: str, tmp_path: Path) -> None:
    theirs = save_theirs(kind, tmp_path / "theirs", torch.bfloat16)
    smp = convert(theirs, tmp_path / "smp", "smp")
    megatron = convert(smp, tmp_path / "megatron", "megatron", megatron_tp=2, shard_size=30_000)
    again = convert(megatron, tmp_path / "again", "smp")
    back = convert(again, tmp_path / "back", "hf")
    assert_same_tensors(theirs, back)
    assert (back / "config.json").read_text() == (convert(smp, tmp_path / "short", "hf") / "config.json").read_text()
    assert (back / "generation_config.json").read_bytes() == (theirs / "generation_config.json").read_bytes()


@pytest.mark.parametrize(
    "kind",
    [
        *("neox", "llama3.1", "qwen2-yarn", "gemma2", "olmo2", "bloom", "llama4-scout", "qwen3.5", "nemotron-h"),
        *("llama-attention-bias", "llama-mlp-bias", "llama-dynamic"),
    ],
)
def test_what_megatron_does_not_compute_is_refused(kind: str, tmp_path: Path) -> None:
    theirs = save_theirs(kind, tmp_path / "theirs")
    with pytest.raises(
        ConfigError,
        match="Megatron's GPT has no --(parallel-residual|rope-original-max-position|rope-scaling-type (yarn|dynamic)|"
        "norm-placement|position-embedding-type alibi|attention-chunk-size|add-attention-output-bias|add-mlp-bias|"
        "linear-attention-type|hybrid-layer-pattern)",
    ):
        convert(theirs, tmp_path / "megatron", "megatron")
    assert list(tmp_path.iterdir()) == [theirs]


@torch.no_grad()
def our_logits(rank: int, world: int, folders: list[str]) -> list[torch.Tensor]:
    """Of checkpoints of any format, read with ``world`` tensor-parallel ranks."""
    from smp.convert.load import load_weights
    from smp.models.gpt import GPT
    from smp.models.micro_batch import MicroBatch
    from smp.parallel.context import build_context

    context, out = build_context(Layout(tp=world), "cpu", sequence_parallel=world > 1), []
    tokens = torch.arange(megatron_core.LENGTH)[None] * 7 % 99
    for folder in folders:
        weights = open_checkpoint(Path(folder)).weights
        model = GPT(weights.config, context, device="cpu").eval()
        load_weights(model, lambda weights=weights: weights)  # type: ignore[misc]
        out.append(model(MicroBatch(tokens)).logits)
    return out


LLAMA = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8}
LLAMA |= {"ffn_hidden_size": 64, "max_position_embeddings": 64, "vocab_size": 99, "rotary_base": 500.0}
GPT = LLAMA | {"num_query_groups": 4, "normalization": "LayerNorm", "swiglu": False, "tanh_gelu": True}
GPT |= {"disable_bias_linear": False, "position_embedding_type": "learned_absolute"}
TIED = {"untie_embeddings_and_output_weights": False}
WRITTEN: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt": GPT | TIED,
    "qwen2": LLAMA | TIED | {"add_qkv_bias": True},
    "qwen3": LLAMA | {"qk_layernorm": True, "kv_channels": 16},
}


@dataclass
class Theirs:
    """What megatron-core did on ``tp`` ranks: ``jobs`` of loading our checkpoints, by family, and of saving its own."""

    tp: int
    sources: dict[str, str]
    loaded: dict[str, dict[str, Any]]
    saved: list[dict[str, Any]]


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=["tp 1", "tp 2"])
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    """One start for all that it does: importing it takes longer than all of its work."""
    root = tmp_path_factory.mktemp("megatron")
    sources, loaded, saved = {}, {}, []
    for kind in COMPARED:
        source = save_theirs(kind, root / kind / "theirs")
        config = open_checkpoint(source).weights.config
        convert(source, root / kind / "megatron", "megatron", megatron_tp=2)
        job = {"action": "load", "settings": asdict(config), "padded": padded_vocab(config, 2)}
        job |= {"checkpoint": str(root / kind / "megatron" / "release"), "logits": str(root / kind / "logits.pt")}
        sources[kind], loaded[kind] = str(source), job
    for name, settings in WRITTEN.items():
        for layers in ("stacked", "single"):
            job = {"action": "save", "settings": asdict(ModelConfig(**settings)), "padded": 128, "args": True}
            job |= {"metadata": {"non_homogeneous_layers": layers == "single"}}
            job |= {"checkpoint": str(root / name / layers), "logits": str(root / f"{name} {layers}.pt")}
            saved.append(job)
    megatron_core.run([*loaded.values(), *saved], request.param, root / "run")
    return Theirs(request.param, sources, loaded, saved)


def test_megatron_core_loads_ours_and_computes_the_same(theirs: Theirs) -> None:
    (found,) = run_distributed(our_logits, 1, list(theirs.sources.values()))
    for (kind, job), ours in zip(theirs.loaded.items(), found, strict=True):
        wanted = torch.load(job["logits"])[..., : ours.shape[-1]]
        assert ours.abs().max() > 1
        assert (wanted - ours).abs().max() <= 1e-4, kind


def test_we_load_what_megatron_core_writes(theirs: Theirs) -> None:
    weights = open_checkpoint(Path(theirs.saved[0]["checkpoint"])).weights
    assert any("_extra_state" in note for note in weights.notes) and any("29 rows" in note for note in weights.notes)
    for found in run_distributed(our_logits, 3 - theirs.tp, [job["checkpoint"] for job in theirs.saved]):
        for job, ours in zip(theirs.saved, found, strict=True):
            wanted = torch.load(job["logits"])[..., :99]
            assert ours.abs().max() > 1
            assert (wanted - ours).abs().max() <= 1e-4, job["checkpoint"]


EXPERTS_WRITTEN: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2-moe": {
        **{"moe_router_pre_softmax": True, "moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
        **{"add_qkv_bias": True},
    },
    "deepseek": {
        **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_num_groups": 2},
        **{"moe_router_group_topk": 1, "moe_router_topk_scaling_factor": 2.5, "moe_shared_expert_intermediate_size": 8},
    },
    "squared relu": {"swiglu": False, "squared_relu": True, "moe_shared_expert_intermediate_size": 16},
}


@pytest.mark.slow
def test_megatron_core_and_experts(tmp_path: Path) -> None:
    """It loads ours and computes the same, and we load what it writes."""
    jobs, sources = [], []
    for name, more in EXPERTS_WRITTEN.items():
        settings = asdict(ModelConfig(**LLAMA, num_experts=4, moe_ffn_hidden_size=24, **more))
        job = {"action": "save", "settings": settings, "padded": 128, "args": True}
        job |= {"metadata": {"non_homogeneous_layers": False}}
        jobs.append(job | {"checkpoint": str(tmp_path / name), "logits": str(tmp_path / f"{name}.pt")})
    for kind in ("qwen2-moe", "glm4-moe-groups"):
        source = save_theirs(kind, tmp_path / f"hf-{kind}")
        config = open_checkpoint(source).weights.config
        release = convert(source, tmp_path / f"{kind}-written", "megatron") / "release"
        job = {"action": "load", "settings": asdict(config), "padded": padded_vocab(config, 1)}
        jobs.append(job | {"checkpoint": str(release), "logits": str(tmp_path / f"{kind}-written.pt")})
        sources.append(str(source))
    megatron_core.run(jobs, 1, tmp_path / "run")
    folders = [*(job["checkpoint"] for job in jobs[: len(EXPERTS_WRITTEN)]), *sources]
    for found in run_distributed(our_logits, 2, folders):
        for job, ours in zip(jobs, found, strict=True):
            wanted = torch.load(job["logits"])[..., : ours.shape[-1]]
            assert ours.abs().max() > 1
            assert (wanted - ours).abs().max() <= 1e-4, job["checkpoint"]


@pytest.mark.slow
def test_a_checkpoint_without_arguments_needs_a_reference(tmp_path: Path) -> None:
    job = {"action": "save", "settings": asdict(ModelConfig(**LLAMA)), "padded": 128, "args": False, "metadata": {}}
    job |= {"checkpoint": str(tmp_path / "bare"), "logits": str(tmp_path / "logits.pt")}
    megatron_core.run([job], 1, tmp_path / "run")
    with pytest.raises(ConfigError, match="--reference FOLDER says what model it is"):
        open_checkpoint(tmp_path / "bare")
    like = save_theirs("llama3", tmp_path / "other")
    with pytest.raises(ValueError, match="has shape"):
        open_checkpoint(tmp_path / "bare", reference=like)
    settings = {**TINY["llama3"][1], "num_hidden_layers": 3, "max_position_embeddings": 64}
    import transformers

    transformers.LlamaConfig(**settings, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "like")
    weights = open_checkpoint(tmp_path / "bare", reference=tmp_path / "like").weights
    assert architecture(weights.config) == architecture(ModelConfig(**LLAMA))
