"""A transformed model in a user's hands: FSDP2 around it, checkpoints, what is refused, what is communicated."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import smp
from smp.config import ConfigError
from tests.distributed import run_distributed
from tests.hf.families import VOCAB, batch, build, gradients, whole, worst

pytest.importorskip("transformers")
STEPS = 3
LAYOUTS = [(2, 2), (2, 1), (1, 2), (4, 0), (1, 0)]
"""tensor_parallel_degree and hybrid_shard_degree of four processes."""


def _ids(step: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (4, 10), generator=torch.Generator().manual_seed(step))


def _train(model: Any, rows: Callable[[torch.Tensor], torch.Tensor], clip: Callable[..., torch.Tensor]) -> list[float]:
    """Gradient norms; every step accumulates two micro-batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    norms = []
    for step in range(STEPS):
        for half in (0, 1):
            ids = rows(_ids(2 * step + half))
            (model(input_ids=ids, labels=ids).loss / 2).backward()
        norms.append(float(clip(model, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def _clip_alone(model: torch.nn.Module, max_norm: float) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def _restart(**config: Any) -> None:
    smp.state.reset()
    smp.init(config)


def _own_rows(ids: torch.Tensor) -> torch.Tensor:
    return ids.chunk(smp.state.dp_size)[smp.state.dp_rank]


def _sharded(model: Any) -> Any:
    for layer in model.get_submodule("model.layers"):
        fully_shard(layer, mesh=smp.state.data_mesh)
    return fully_shard(model, mesh=smp.state.data_mesh)


def _loops(rank: int, world_size: int, folder: str) -> list[tuple[Any, float, float]]:
    results = []
    for family in ("Qwen3", "Qwen2"):  # with q/k norms; tied
        reference = build(family)
        fresh = copy.deepcopy(reference)
        wanted = _train(reference, lambda ids: ids, _clip_alone)
        weights = {name: p.detach().clone() for name, p in reference.named_parameters()}
        for tp, shard in LAYOUTS if family == "Qwen3" else LAYOUTS[:1]:
            _restart(tensor_parallel_degree=tp, hybrid_shard_degree=shard)
            model = _sharded(smp.transform(copy.deepcopy(fresh)))
            if shard == 1:
                model.gradient_checkpointing_enable()
            found = _train(model, _own_rows, smp.clip_grad_norm_)
            norm = max(abs(a - b) / b for a, b in zip(found, wanted, strict=True))
            results.append(((family, tp, shard), norm, worst(_whole(model), weights)[0]))
            if shard == 2 and family == "Qwen2":
                _saved_like(model, reference, weights, f"{folder}/{tp}", rank)
    return results


def _whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p) for name, p in model.named_parameters()}


def _saved_like(model: Any, reference: Any, weights: dict[str, torch.Tensor], folder: str, rank: int) -> None:
    """Trained weights leave in Hugging Face's names and global shapes, and come back into the sharded model."""
    from transformers import AutoModelForCausalLM

    shapes = {name: tensor.shape for name, tensor in reference.state_dict().items()}
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes
    model.save_pretrained(folder)
    trained = _whole(model)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(trained[name], p) for name, p in loaded.named_parameters())
    model.load_state_dict(reference.state_dict())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in _whole(model).items())
    try:
        model.load_state_dict({"lm_head.weight": torch.zeros(3, 3)}, strict=False)
        raise AssertionError("a wrong shape was loaded")
    except ConfigError as error:
        assert "lm_head.weight is (3, 3), the model's is" in str(error)
    if rank == 0:
        reference = copy.deepcopy(reference)
        reference.load_state_dict(trained | {"lm_head.weight": trained["model.embed_tokens.weight"]})
        reference.save_pretrained(f"{folder}-alone")
        files = [sorted(p.name for p in Path(f).iterdir()) for f in (folder, f"{folder}-alone")]
        assert files[0] == files[1]
        for name in files[0]:
            assert Path(folder, name).read_bytes() == Path(f"{folder}-alone", name).read_bytes(), name


def test_a_loop_of_ones_own_trains_alike_in_every_layout(tmp_path: Path) -> None:
    for results in run_distributed(_loops, 4, str(tmp_path)):
        assert len(results) == len(LAYOUTS) + 1
        assert all(norm <= 1e-5 and weights <= 1e-5 for _, norm, weights in results), results


def _refused(message: str, action: Callable[[], Any]) -> None:
    try:
        action()
    except (ConfigError, AttributeError) as error:
        assert message in str(error) and "\n" not in str(error), error
        return
    raise AssertionError(f"not refused: {message}")


def _mistakes(rank: int, world_size: int) -> dict[str, Any]:
    smp.state.reset()
    _refused("call smp.init(...) first", lambda: smp.transform(build("Llama")))
    other_keys = {"tensor_parallel_degree": 2 if rank else 1}
    _refused("tensor_parallel_degree is 1 on rank 0 and 2 on rank 1", lambda: smp.init(other_keys))
    wrong_on_one = {"tensor_parallel_degree": "two" if rank else 1}
    _refused("tensor_parallel_degree", lambda: smp.init(wrong_on_one))  # all ranks, and none waits
    smp.init({"tensor_parallel_degree": 2, "hybrid_shard_degree": 1, "random_seed": 1})
    assert smp.is_initialized()
    _refused("smp.init was called already", lambda: smp.init({}))
    _refused("smp.state.tp_rank cannot be set", lambda: setattr(smp.state, "tp_rank", 0))
    model = build("Qwen3")
    names = {name: p.shape for name, p in model.named_parameters()}
    _refused("smp.init chose cpu", lambda: smp.transform(model, device="cuda"))
    optimizer = torch.optim.SGD(model.parameters())
    _refused("SGD was built with this model's parameters", lambda: smp.transform(model))
    del optimizer
    other = build("Qwen3")
    with torch.no_grad():
        other.lm_head.weight[0, 0] += rank
    _refused("lm_head.weight differs between ranks 0 and 1", lambda: smp.transform(other))
    assert {name: p.shape for name, p in model.named_parameters()} == names and not hasattr(model, "smp_report")
    wanted = gradients(model, 4)
    model.zero_grad()
    wrong = {"model.layers.*.self_attn.q_norm": "replicate"}
    _refused("the gradient of model.layers.", lambda: smp.transform(copy.deepcopy(model), rows=wrong))
    whole_row = {"model.layers.*.self_attn.o_proj": "replicate"}
    _refused("does not run", lambda: smp.transform(copy.deepcopy(model), rows=whole_row))
    half = copy.deepcopy(model)
    half.lm_head.to("meta")
    _refused("is on the meta device and other parameters are not", lambda: smp.transform(half))
    received = _from_rank_zero(rank, model)
    right = {"model.layers.*.mlp": "replicate"}
    smp.transform(model, rows=right)
    assert all(p.grad is None for p in model.parameters())
    _refused("resize the model before smp.transform", lambda: model.resize_token_embeddings(100))
    _refused("was transformed already", lambda: smp.transform(model))
    _refused("is a DTensor already", lambda: smp.transform(_sharded(build("Llama"))))
    for transformed in (model, received, copy.deepcopy(received)):
        assert worst(gradients(transformed, 4), wanted)[0] <= 1e-5
    _refused("is not sharded, so each of the 2 data ranks", lambda: smp.clip_grad_norm_(model, 1.0))
    _in_16_bits(build("Llama"))
    smp.transform(build("Mixtral"), rows={"model.layers.*.mlp.experts": "replicate"})  # which compares it itself
    smp.transform(build("Mixtral"), verify=True)  # experts cut
    groups = [smp.state.tp_process_group, smp.state.rep_rank_process_group]
    return {
        "ranks": [torch.distributed.get_process_group_ranks(group) for group in groups],
        "data": (smp.state.dp_rank, smp.state.dp_size, smp.state.hybrid_shard_degree),
        "tp": (smp.state.tp_rank, smp.state.tp_size, smp.state.tensor_parallel_degree),
        "collectives": _count(received),
        "vocabulary": _out_of_range(received),
    }


def _two_data_ranks(rank: int, world_size: int, folder: str) -> list[float]:
    """Without tensor parallelism: the norm under DistributedDataParallel and fully_shard."""
    smp.init({})

    def with_gradients(wrap: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        model = wrap(torch.nn.Linear(4, 4))
        model(torch.full((2, 4), rank + 1.0)).square().mean().backward()
        return model

    plain = with_gradients(lambda model: model)
    _refused("weight is not sharded, so each of the 2 data ranks", lambda: smp.clip_grad_norm_(plain, 1.0))
    _refused("max_norm 0.0: give a number above 0", lambda: smp.clip_grad_norm_(plain, 0.0))
    model = smp.transform(build("Llama"))
    for options in ({"distributed_checkpoint": rank == 0}, {"state_dict": {"a": 1} if rank == 0 else None}):
        _refused("leave out " + next(iter(options)), lambda options=options: model.save_pretrained(folder, **options))
    whole_rows = [{"model.layers.0.mlp": "replicate"}, {"model.layers.*.mlp": "replicated_with_grad_allreduce"}]
    for rows, message in zip(whole_rows, ("write model.layers.*.mlp", "no parameters of its own"), strict=True):
        _refused(message, lambda rows=rows: smp.transform(build("Llama"), rows=rows))
    wraps = [DistributedDataParallel, lambda model: fully_shard(model, mesh=smp.state.data_mesh)]
    return [float(smp.clip_grad_norm_(with_gradients(wrap), 1.0)) for wrap in wraps]


def test_two_data_ranks_without_tensor_parallelism(tmp_path: Path) -> None:
    results = run_distributed(_two_data_ranks, 2, str(tmp_path))
    assert results[0] == results[1] and results[0][0] == pytest.approx(results[0][1], rel=1e-5)


def _from_rank_zero(rank: int, model: Any) -> Any:
    """Rank 0 has the weights and buffers, the others nothing."""
    mine = copy.deepcopy(model)
    if rank:
        mine = mine.to("meta")
    return smp.transform(mine, load_state_dict_from_rank0=True)


def _in_16_bits(model: Any) -> None:
    data = batch(2)
    wanted = model(**data).logits
    smp.transform(model, dtype=torch.bfloat16)
    found = model(**data).logits
    assert found.dtype == torch.bfloat16 and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert 1e-5 < float((found - wanted).norm() / wanted.norm()) < 3e-2


class _Counter(TorchDispatchMode):
    """All-reduces and all-gathers while it is entered. (CommDebugMode adds hooks that give every module another input
    tensor, so nothing could be shared.)"""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"all_reduce": 0, "all_gather_into_tensor": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in self.counts:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _count(model: Any) -> list[tuple[int, ...]]:
    """Forward, backward."""
    model.zero_grad()
    with _Counter() as forward:
        loss = model(**batch(1)).loss
    with _Counter() as backward:
        loss.backward()
    return [tuple(mode.counts.values()) for mode in (forward, backward)]


def _out_of_range(model: Any) -> bool:
    try:
        model(input_ids=torch.tensor([[1, VOCAB]]))
    except IndexError:
        return True
    return False


def test_mistakes_are_one_line_and_leave_the_model_alone() -> None:
    results = run_distributed(_mistakes, 4)
    assert [r["ranks"] for r in results] == [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]
    assert [r["data"] for r in results] == [(0, 2, 1), (0, 2, 1), (1, 2, 1), (1, 2, 1)]
    assert [r["tp"] for r in results] == [(0, 2, 2), (1, 2, 2)] * 2
    for result in results:
        # Two layers: a sum per embedding, attention and MLP; backwards per attention, MLP and head, and four norms.
        assert result["collectives"] == [(5, 1), (9, 0)]
        assert result["vocabulary"]


def test_a_process_group_that_ended_takes_smp_init_with_it() -> None:
    smp.state.reset()
    for _ in range(2):
        smp.init({})
        assert smp.is_initialized()
        torch.distributed.destroy_process_group()
        assert not smp.is_initialized()
    smp.state.reset()
