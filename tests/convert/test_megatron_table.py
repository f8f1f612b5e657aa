"""Megatron's arguments as settings, and what is read and written beside its tensors, without megatron-core."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from smp.checkpoint import CheckpointError
from smp.checkpoint.format.tensor_file import Slot
from smp.config import ConfigError
from smp.config.layers import layer_specs
from smp.convert.convert import write
from smp.convert.formats import Opened, make_target, open_checkpoint
from smp.convert.huggingface.config import architecture, resolved, to_hf
from smp.convert.megatron.table import from_args, to_args
from smp.convert.store import OpenFiles, Piece, PieceStore, Stored
from smp.convert.weights import Weights
from smp.models.inventory import inventory

LLAMA: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
LLAMA |= {"kv_channels": 8, "ffn_hidden_size": 64, "max_position_embeddings": 64, "vocab_size": 99}
CONFIG = resolved(**LLAMA)


class Drawn(Weights):
    """Random weights of a model."""

    def __init__(self, **settings: Any) -> None:
        self.config, self.notes = resolved(**{**LLAMA, **settings}), []
        self.tensors = {p.name: Stored(p.shape, torch.float32) for p in inventory(self.config)}

    def read_into(self, name: str, offsets: Any, out: torch.Tensor) -> None:
        whole = torch.randn(self.tensors[name].shape, generator=torch.Generator().manual_seed(len(name)))
        out.copy_(whole[tuple(slice(o, o + n) for o, n in zip(offsets, out.shape, strict=True))])

    def fingerprint(self) -> Any:
        return 0


def written(folder: Path, **settings: Any) -> Path:
    """A torch_dist checkpoint of ours, the folder with its files."""
    opened = Opened(Drawn(**settings), None)
    write(opened.weights, make_target("megatron", opened), folder, options={}, workers=1)
    return folder / "release"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_expert_capacity_factor", 1.25),
        ("moe_apply_probs_on_input", True),
        ("moe_latent_size", 64),
        ("moe_router_topk_limited_devices", 2),
        ("multi_latent_attention", True),
        ("apply_residual_connection_post_layernorm", True),
        ("heterogeneous_layers_config_path", "layers.json"),
        ("mtp_num_layers", 1),
        ("qk_l2_norm", True),
        ("is_hybrid_model", True),
        ("softmax_type", "off-by-one"),
        ("softmax_scale", 0.5),
        ("attention_output_gate", True),
        ("glu_linear_offset", 1.0),
        ("activation_func_clamp_value", 7.0),
        ("quick_geglu", True),
        ("experimental_attention_variant", "dsa"),
        ("linear_attention_freq", 4),
        ("use_mup", True),
        ("enable_mhc_connections", True),
    ],
)
def test_what_our_decoder_does_not_compute_is_refused_by_name(name: str, value: Any) -> None:
    args = vars(to_args(CONFIG, 1))
    assert architecture(from_args(args | {name: None}, "there", 128)) == architecture(CONFIG)
    with pytest.raises(ConfigError, match=f"there: a model with {name} "):
        from_args(args | {name: value}, "there", 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_layernorm": True, "normalization": "LayerNorm"}, "qk_layernorm and normalization LayerNorm"),
        ({"rotary_seq_len_interpolation_factor": "4"}, "--rope-scaling-factor '4' is not a value"),
        ({"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 4}, "use_rope_scaling and rotary_seq_len"),
        ({"window_size": (128, 5)}, r"window_size \(128, 5\)"),
        ({"position_embedding_type": "yarn"}, "--position-embedding-type 'yarn' is not a value"),
        ({"normalization": "L2Norm"}, "--normalization 'L2Norm' is not a value"),
        ({"num_layers": "2"}, "--num-layers '2' is not a value"),
        ({"norm_epsilon": float("nan")}, "--norm-epsilon nan is not a value"),
        ({"num_query_groups": 3}, "not divisible by --num-query-groups 3"),
        ({"rotary_percent": 0.7}, "rotates 5 channels: RoPE needs an even number"),
        ({"num_attention_heads": None}, "--num-attention-heads None is not a value"),
    ],
)
def test_arguments_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"there: .*{message}"):
        from_args(vars(to_args(CONFIG, 1)) | changes, "there", 128)


def test_a_layer_norm_of_queries_and_keys_cannot_be_written() -> None:
    """Ours is an RMSNorm in every model, Megatron's is of the kind of the others."""
    with pytest.raises(ConfigError, match="no --normalization LayerNorm with --qk-layernorm"):
        to_args(resolved(**{**LLAMA, "normalization": "LayerNorm", "qk_layernorm": True}), 1)
    to_args(resolved(**{**LLAMA, "qk_layernorm": True}), 1)


def common_content(release: Path) -> dict[str, Any]:
    return torch.load(release / "common.pt", weights_only=False)


def test_nothing_is_cut_when_nothing_says_where_the_padding_begins(tmp_path: Path) -> None:
    """The NullTokenizer has one id more than its --vocab-size says, or not, by Megatron's version."""
    release = written(tmp_path / "megatron")
    assert open_checkpoint(release).weights.tensors["embedding.weight"].shape[0] == 99
    content = common_content(release)
    for change in ({"vocab_size": None}, {"tokenizer_type": "NullTokenizer"}):
        vars(content["args"]).update({"vocab_size": 99} | change)
        torch.save(content, release / "common.pt")
        weights = open_checkpoint(release).weights
        assert weights.tensors["embedding.weight"].shape[0] == 128
        assert any("how many of the 128 rows" in note for note in weights.notes)
        weights = open_checkpoint(release, vocab_size=99).weights
        assert weights.tensors["embedding.weight"].shape[0] == 99
        assert not any("how many of the 128 rows" in note for note in weights.notes)


def test_arguments_within_the_checkpoint(tmp_path: Path) -> None:
    """megatron-core after 0.16 writes no common.pt: what was in it is an object beside the tensors."""
    release = written(tmp_path / "megatron")
    saved, buffer = common_content(release), io.BytesIO()
    torch.save([saved], buffer)
    metadata = pickle.loads((release / ".metadata").read_bytes())
    index, info = next((i, s) for i, s in metadata.storage_data.items() if "_extra_state" in i.fqn)
    path = release / info.relative_path
    place = type(info)(info.relative_path, path.stat().st_size, len(buffer.getvalue()))
    with path.open("ab") as file:
        file.write(buffer.getvalue())
    metadata.storage_data[type(index)("common_state/shard_0_1")] = place
    metadata.state_dict_metadata["common_state/shard_0_1"] = metadata.state_dict_metadata[index.fqn]
    (release / ".metadata").write_bytes(pickle.dumps(metadata))
    (release / "common.pt").unlink()
    weights = open_checkpoint(tmp_path / "megatron").weights
    assert architecture(weights.config) == architecture(CONFIG)
    assert torch.equal(weights.read("layers.1.mlp.up.weight"), Drawn().read("layers.1.mlp.up.weight"))


def test_without_arguments_a_reference_says_what_the_model_is(tmp_path: Path) -> None:
    release = written(tmp_path / "megatron")
    torch.save({"iteration": 5}, release / "common.pt")
    (tmp_path / "like").mkdir()
    (tmp_path / "like" / "config.json").write_text(json.dumps(to_hf(CONFIG, "float32")))
    with pytest.raises(ConfigError, match="holds no arguments of Megatron's: --reference FOLDER"):
        open_checkpoint(release)
    with pytest.raises(ConfigError, match="--vocab-size 90: --reference .*like has 99 token ids"):
        open_checkpoint(release, reference=tmp_path / "like", vocab_size=90)
    with open_checkpoint(release, reference=tmp_path / "like").weights as weights:
        assert torch.equal(weights.read("layers.1.mlp.up.weight"), Drawn().read("layers.1.mlp.up.weight"))


def test_arguments_that_are_something_else(tmp_path: Path) -> None:
    release = written(tmp_path / "megatron")
    torch.save({"args": [1, 2]}, release / "common.pt")
    with pytest.raises(CheckpointError, match="its args are a list, not arguments of a command line"):
        open_checkpoint(release)


def test_the_last_stages_copy_of_a_tied_embedding_must_be_one(tmp_path: Path) -> None:
    release = written(tmp_path / "megatron", untie_embeddings_and_output_weights=False)
    content = pickle.loads((release / ".metadata").read_bytes())
    embedding, head = "embedding.word_embeddings.weight", "output_layer.weight"
    index, info = next((i, s) for i, s in content.storage_data.items() if i.fqn == embedding)
    path = release / info.relative_path
    copy = torch.load(io.BytesIO(path.read_bytes()[info.offset :][: info.length]))

    def add_head(tensor: torch.Tensor) -> None:
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        place = type(info)(info.relative_path, path.stat().st_size, len(buffer.getvalue()))
        with path.open("ab") as file:
            file.write(buffer.getvalue())
        content.state_dict_metadata[head] = content.state_dict_metadata[embedding]
        content.storage_data[type(index)(head, index.offset)] = place
        (release / ".metadata").write_bytes(pickle.dumps(content))

    add_head(copy)
    with open_checkpoint(release).weights as weights:
        assert "head.weight" not in weights.tensors
    copy[3, 5] += 1
    add_head(copy)
    with pytest.raises(CheckpointError, match="output_layer.weight differs from embedding.word_embeddings.weight"):
        open_checkpoint(release)


def test_transformer_engine_finds_its_empty_objects(tmp_path: Path) -> None:
    metadata = pickle.loads((written(tmp_path / "megatron", qk_layernorm=True) / ".metadata").read_bytes())
    names = {name for name in metadata.state_dict_metadata if "_extra_state" in name}
    modules = ("self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention")
    modules += ("self_attention.q_layernorm", "self_attention.k_layernorm", "mlp.linear_fc1", "mlp.linear_fc2")
    wanted = {f"decoder.layers.{m}._extra_state/shard_{i}_2" for m in modules for i in range(2)}
    assert names == wanted | {f"{m}._extra_state/shard_0_1" for m in ("decoder.final_layernorm", "output_layer")}


@pytest.mark.parametrize("text", ["²", "5", "../release", ""])
def test_a_tracker_that_names_nothing(text: str, tmp_path: Path) -> None:
    written(tmp_path / "megatron")
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="latest_checkpointed_iteration.txt names .*, which is no checkpoint"):
        open_checkpoint(tmp_path / "megatron")


def test_pieces_that_overlap_leave_a_hole(tmp_path: Path) -> None:
    """As many elements as the tensor has are not enough."""

    def pieces(*regions: tuple[tuple[int, int], tuple[int, int]]) -> list[Piece]:
        return [Piece("file", Slot("t", "F32", shape, 0, 4 * shape[0] * shape[1]), at) for at, shape in regions]

    good = pieces(((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 2), (2, 2)))
    assert PieceStore(OpenFiles(tmp_path), {"t": good}, {"t": (4, 4)}).tensors["t"].shape == (4, 4)
    bad = pieces(((0, 0), (2, 4)), ((1, 1), (2, 2)), ((2, 2), (2, 2)))
    with pytest.raises(CheckpointError, match=r"the 3 parts of tensor t do not make up its shape \[4, 4\]"):
        PieceStore(OpenFiles(tmp_path), {"t": bad}, {"t": (4, 4)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_router_load_balancing_type": "sinkhorn"}, "a router balanced by sinkhorn is not supported"),
        ({"moe_layer_freq": [0, 1, 1]}, r"moe_layer_freq \[0, 1, 1\] is not supported, only experts in every layer"),
    ],
)
def test_experts_that_cannot_be_read(changes: dict[str, Any], message: str) -> None:
    args = vars(to_args(resolved(**LLAMA, num_experts=4, swiglu=True, disable_bias_linear=True), 1))
    with pytest.raises(ConfigError, match=message):
        from_args(args | changes, "there", 128)


def test_dense_layers_between_experts_are_not_written() -> None:
    config = resolved(**LLAMA, num_experts=4, swiglu=True, disable_bias_linear=True, moe_layer_freq="[0]+[1]")
    with pytest.raises(ConfigError, match="only models with experts in every layer are written"):
        to_args(config, 1)


@pytest.mark.parametrize("said", [2, [1, 0, 1, 0]])
def test_layers_with_a_window_by_megatrons_words(said: Any) -> None:
    """There a layer is counted from 1, and every n-th has no window; (15, 0) are 15 tokens before each and it."""
    config = resolved(**LLAMA | {"num_layers": 4, "window_size": 16, "window_attn_skip_freq": "2"})
    args = vars(to_args(config, 1))
    assert args["window_size"] == (15, 0) and args["window_attn_skip_freq"] == [1, 0, 1, 0]
    found = from_args(args | {"window_attn_skip_freq": said}, "there", 128)
    assert [spec.mixer.window for spec in layer_specs(found)] == [16, None, 16, None]
    everywhere = from_args(args | {"window_attn_skip_freq": None}, "there", 128)
    assert [spec.mixer.window for spec in layer_specs(everywhere)] == [16] * 4


def test_norms_of_one_plus_w_keep_their_numbers(tmp_path: Path) -> None:
    """There, too, files hold w; an older version's arguments do not say so and mean w itself."""
    args = vars(to_args(resolved(**LLAMA | {"apply_layernorm_1p": True}), 1))
    assert args["apply_layernorm_1p"] is True
    assert from_args(args, "there", 128).apply_layernorm_1p
    del args["apply_layernorm_1p"]
    assert not from_args(args, "there", 128).apply_layernorm_1p
    folder, drawn = written(tmp_path / "there", apply_layernorm_1p=True), Drawn(apply_layernorm_1p=True)
    name = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    state = {name: torch.empty(2, 32)}
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    again = open_checkpoint(folder).weights
    assert again.config.apply_layernorm_1p
    for layer in range(2):
        ours = f"layers.{layer}.attention_norm.weight"
        want, back = torch.empty(32), torch.empty(32)
        drawn.read_into(ours, (0,), want)
        again.read_into(ours, (0,), back)
        assert torch.equal(state[name][layer], want) and torch.equal(back, want)
