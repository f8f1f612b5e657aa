"""Our decoder against transformers' Llama and GPT-2 with the same weights, fp32."""

from __future__ import annotations

import pytest
import torch

from smp.config import ModelConfig
from tests.distributed import run_distributed

transformers = pytest.importorskip("transformers")

ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def llama_weights(theirs: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Their tensors under our names."""
    state = theirs.state_dict()
    out = {
        "embedding.weight": state["model.embed_tokens.weight"],
        "final_norm.weight": state["model.norm.weight"],
        "head.weight": state["lm_head.weight"],
    }
    for i in range(theirs.config.num_hidden_layers):
        here, there = f"layers.{i}.", f"model.layers.{i}."
        out |= {f"{here}attention.{a}.weight": state[f"{there}self_attn.{b}.weight"] for a, b in ATTENTION.items()}
        out |= {f"{here}mlp.{a}.weight": state[f"{there}mlp.{b}.weight"] for a, b in MLP.items()}
        out[f"{here}attention_norm.weight"] = state[f"{there}input_layernorm.weight"]
        out[f"{here}mlp_norm.weight"] = state[f"{there}post_attention_layernorm.weight"]
    return out


def gpt2_weights(theirs: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Their tensors under our names; theirs are (in, out) and q, k, v are one matrix."""
    state = theirs.transformer.state_dict()
    out = {"embedding.weight": state["wte.weight"], "positions.weight": state["wpe.weight"]}
    norms = {"final_norm": "ln_f"}
    for i in range(theirs.config.n_layer):
        here, there = f"layers.{i}.", f"h.{i}."
        norms |= {f"{here}attention_norm": f"{there}ln_1", f"{here}mlp_norm": f"{there}ln_2"}
        for part in ("weight", "bias"):
            fused = state[f"{there}attn.c_attn.{part}"].chunk(3, dim=-1)
            out |= {f"{here}attention.{n}.{part}": t.t() for n, t in zip(("query", "key", "value"), fused, strict=True)}
            for a, b in {"attention.output": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}.items():
                out[f"{here}{a}.{part}"] = state[f"{there}{b}.{part}"].t()
    for a, b in norms.items():
        out |= {f"{a}.{part}": state[f"{b}.{part}"] for part in ("weight", "bias")}
    return out


def build(kind: str) -> tuple[torch.nn.Module, ModelConfig, dict[str, torch.Tensor]]:
    """Their model, our configuration of it, and its weights under our names."""
    torch.manual_seed(0)
    shared = {"vocab_size": 99, "make_vocab_size_divisible_by": 8, "max_position_embeddings": 64, "num_layers": 2}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "kv_channels": 8, "init_method_std": 0.5}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=99, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.5
        )
        theirs = transformers.GPT2LMHeadModel(config).eval()
        ours = ModelConfig(
            **shared,
            **sizes,
            ffn_hidden_size=128,
            num_query_groups=4,
            position_embedding_type="learned_absolute",
            normalization="LayerNorm",
            swiglu=False,
            tanh_gelu=True,
            untie_embeddings_and_output_weights=False,
            disable_bias_linear=False,
        )
        return theirs, ours, gpt2_weights(theirs)
    scaled = kind == "llama3"
    rope = {"rope_theta": 500.0, "rope_type": "default"}
    if scaled:
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 16}
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters=rope,
        rms_norm_eps=1e-5,
        initializer_range=0.5,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    ours = ModelConfig(
        **shared,
        **sizes,
        ffn_hidden_size=64,
        num_query_groups=2,
        rotary_base=500.0,
        use_rope_scaling=scaled,
        rope_original_max_position=16,
    )
    return theirs, ours, llama_weights(theirs)


def differences(rank: int, world: int, kind: str) -> tuple[float, float]:
    """Largest absolute difference of the logits, relative difference of the loss."""
    from smp.config import Layout
    from smp.models.gpt import GPT
    from smp.parallel.boxes import local_box
    from smp.parallel.mesh import build_mesh

    theirs, config, weights = build(kind)
    mesh = build_mesh(Layout(tp=world), "cpu")
    ours = GPT(config, mesh["tp"], sequence_parallel=world > 1, device="cpu").eval()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            box, local = local_box(parameter), parameter.to_local().zero_()
            part = weights[name]
            for dim, start in enumerate(box.offsets):
                part = part.narrow(
                    dim, min(start, part.shape[dim]), max(0, min(box.sizes[dim], part.shape[dim] - start))
                )
            local[tuple(slice(0, size) for size in part.shape)] = part
        tokens = torch.randint(0, 99, (2, 41), generator=torch.Generator().manual_seed(1))
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        want = theirs(inputs).logits
        got = ours(inputs)
        loss = ours(inputs, labels, torch.full(labels.shape, 1.0 / labels.numel()))
    reference = torch.nn.functional.cross_entropy(want.flatten(0, 1), labels.flatten())
    return (got - want).abs().max().item(), abs(loss.item() / reference.item() - 1)


@pytest.mark.parametrize("kind", ["llama", "llama3", "gpt2"])
@pytest.mark.parametrize("tp", [1, 2])
def test_logits_and_loss_are_theirs(kind: str, tp: int) -> None:
    for logits, loss in run_distributed(differences, tp, kind):
        assert logits <= 1e-4
        assert loss <= 1e-5
