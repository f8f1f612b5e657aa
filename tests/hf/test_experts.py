"""Experts over expert-parallel ranks: logits, gradients, norms and weights equal one process; and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import smp
from smp.checkpoint import load, restore_optimizer_scalars, save, training_state
from smp.config import ConfigError
from tests.distributed import run_distributed
from tests.hf.families import VOCAB, build, whole, worst

transformers = pytest.importorskip("transformers")
LAYOUTS = [(2, 2, 2), (1, 4, 4), (1, 2, 2)]
"""tensor_parallel_degree, hybrid_shard_degree and expert_parallel_degree of four processes; the first two are fast."""


def _ids(step: int) -> torch.Tensor:
    """Of four sequences. One has tokens of one kind, which go to few experts; in the third step all have."""
    ids = torch.randint(3, VOCAB, (4, 10), generator=torch.Generator().manual_seed(step))
    ids[slice(None) if step == 2 else 1] = 5
    return ids


def _optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def _train(model: Any, optimizer: Any, steps: range, parts: int = 1) -> list[float]:
    """Losses and norms; this rank's sequences come as ``parts`` micro-batches."""
    seen = []
    for step in steps:
        losses = []
        for ids in _ids(step).chunk(smp.state.dp_size)[smp.state.dp_rank].chunk(parts):
            loss = model(input_ids=ids, labels=ids).loss / parts
            loss.backward()
            losses.append(loss.detach())
        norm = smp.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen += [float(smp.state.mean_over_data(torch.stack(losses).sum())), float(norm)]
    return seen


def _observe(model: Any, steps: int) -> dict[str, Any]:
    ids = _ids(50)
    mine = ids.chunk(smp.state.dp_size)[smp.state.dp_rank]
    out = model(input_ids=mine, labels=mine)
    out.loss.backward()
    seen = {"gradients": {name: whole(p.grad) for name, p in model.named_parameters()}}
    model.zero_grad()
    seen["logits"] = out.logits.detach()
    seen["losses and norms"] = _train(model, _optimizer(model), range(steps))
    seen["weights"] = {name: whole(p) for name, p in model.named_parameters()}
    return seen


def _restart(tp: int, shard: int, ep: int) -> None:
    smp.state.reset()
    smp.init({"tensor_parallel_degree": tp, "hybrid_shard_degree": shard, "expert_parallel_degree": ep})


def _sharded(model: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=smp.state.expert_mesh)
        fully_shard(layer, mesh=smp.state.data_mesh)
    return fully_shard(model, mesh=smp.state.data_mesh)


def _errors(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    logits = wanted["logits"].chunk(smp.state.dp_size)[smp.state.dp_rank]
    pairs = zip(found["losses and norms"], wanted["losses and norms"], strict=True)
    return {
        "logits": float((found["logits"] - logits).norm() / logits.norm()),
        "gradients": worst(found["gradients"], wanted["gradients"])[0],
        "losses and norms": max(abs(a - b) / b for a, b in pairs),
        "weights": worst(found["weights"], wanted["weights"])[0],
    }


def _compare(
    rank: int, world_size: int, families: list[str], layouts: list[Any], steps: int, folder: str
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for family in families:
        fresh = build(family)
        _restart(4, 0, 1)  # every rank has all rows
        wanted = _observe(copy.deepcopy(fresh), steps)
        for tp, shard, ep in layouts:
            _restart(tp, shard, ep)
            model = smp.transform(copy.deepcopy(fresh), config=smp.MoEConfig(), verify=True)
            experts = model.model.layers[0].mlp.experts
            assert experts.down_proj.to_local().shape[0] == 4 // (ep * tp)
            _sharded(model)
            if (tp, shard, ep) == LAYOUTS[0]:
                model.save_pretrained(f"{folder}/{family}/transformed")
                if rank == 0:
                    fresh.save_pretrained(f"{folder}/{family}/whole")
            results[f"{family}, tp {tp} x shard {shard} x ep {ep}"] = _errors(_observe(model, steps), wanted)
        _mistakes(fresh)
    return results


def _all_equal(families: list[str], layouts: list[Any], steps: int, folder: Path) -> None:
    for results in run_distributed(_compare, 4, families, layouts, steps, str(folder)):
        assert len(results) == len(families) * len(layouts)
        for case, errors in results.items():
            assert max(errors.values()) <= 1e-5, (case, errors)
    for family in families:
        files = [sorted((folder / family / kind).iterdir()) for kind in ("whole", "transformed")]
        assert [f.name for f in files[0]] == [f.name for f in files[1]]
        assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True))


def test_expert_parallelism_equals_one_process(tmp_path: Path) -> None:
    _all_equal(["Qwen3 MoE"], LAYOUTS[:2], 3, tmp_path)


@pytest.mark.slow
def test_more_families(tmp_path: Path) -> None:
    _all_equal(["Mixtral", "Qwen2 MoE", "Qwen3 MoE", "OLMoE"], LAYOUTS, 10, tmp_path)


def _resumed(tp: int, ep: int, folder: str, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    _restart(tp, 0, ep)
    model = _sharded(smp.transform(build("Mixtral"))) if ep > 1 else smp.transform(build("Mixtral"))
    optimizer = _optimizer(model)
    tensors, _ = training_state(model, optimizer)
    restore_optimizer_scalars(model, optimizer, load(tensors, folder)["step"])
    return _train(model, optimizer, range(2, steps)), {name: whole(p) for name, p in model.named_parameters()}


def _uses(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Checkpoints, the router's loss, and first values."""
    found: dict[str, Any] = {}
    fresh = build("Mixtral")
    _restart(2, 0, 2)
    model = _sharded(smp.transform(copy.deepcopy(fresh)))
    optimizer = _optimizer(model)
    _train(model, optimizer, range(2))
    tensors, scalars = training_state(model, optimizer)
    save(tensors, folder, extra={"step": scalars})
    goes_on = _train(model, optimizer, range(2, 4))
    weights = {name: whole(p) for name, p in model.named_parameters()}
    for tp, ep in ((2, 2), (1, 4), (4, 1)):
        again, other = _resumed(tp, ep, folder, 4)
        found[f"resumed at tp {tp} x ep {ep}"] = again, goes_on, worst(other, weights)[0]
    aux = smp.MoEConfig(moe_load_balancing="aux_loss", moe_aux_loss_coeff=0.1)
    _restart(4, 0, 1)
    alone = copy.deepcopy(fresh)
    without = _train(copy.deepcopy(alone), _optimizer(alone), range(1))
    alone.config.output_router_logits, alone.router_aux_loss_coef = True, 0.1
    wanted = _train(alone, _optimizer(alone), range(3), parts=4)
    _restart(1, 4, 4)
    model = _sharded(smp.transform(copy.deepcopy(fresh), config=aux))
    seen = _train(model, _optimizer(model), range(3))
    assert abs(seen[0] - without[0]) > 1e-3
    trained = {name: p.detach() for name, p in alone.named_parameters()}
    found["auxiliary loss"] = seen, wanted, worst({n: whole(p) for n, p in model.named_parameters()}, trained)[0]
    drawn = [_first_values(tp, ep) for tp, ep in ((2, 2), (1, 4))]
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    return found


def _first_values(tp: int, ep: int) -> dict[str, torch.Tensor]:
    _restart(tp, 0, ep)
    with torch.device("meta"):
        model = build("Mixtral")
    smp.delayed_param.DelayedParamIniter(_sharded(smp.transform(model)), seed=3).init()
    return {name: whole(p) for name, p in model.named_parameters()}


def _refused(message: str, call: Any) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def _mistakes(fresh: Any) -> None:
    _restart(1, 4, 4)
    _refused("expert_parallel_degree 4: LlamaForCausalLM has no experts", lambda: smp.transform(build("Llama")))
    _refused(r"config=dict\): a smp.MoEConfig, or None", lambda: smp.transform(copy.deepcopy(fresh), config={}))
    whole_rows = {"model.layers.*.mlp.experts": "replicate"}
    _refused("has no experts", lambda: smp.transform(copy.deepcopy(fresh), rows=whole_rows))
    model = smp.transform(copy.deepcopy(fresh))
    ids = _ids(0)
    model(input_ids=ids, labels=ids).loss.backward()
    _refused("fully_shard.experts, mesh=smp.state.expert_mesh", lambda: smp.clip_grad_norm_(model, 1.0))
    _refused("Trainer's clipping takes one mesh", lambda: model.config.distributed_config.dp_size)
    aux = smp.MoEConfig(moe_load_balancing="aux_loss")
    _restart(1, 0, 1)
    _refused("LlamaForCausalLM has no experts", lambda: smp.transform(build("Llama"), config=smp.MoEConfig()))
    _refused("LlamaForCausalLM has no auxiliary loss", lambda: smp.transform(build("Llama"), config=aux))


@pytest.mark.slow
def test_checkpoints_first_values_and_the_routers_loss(tmp_path: Path) -> None:
    for found in run_distributed(_uses, 4, str(tmp_path / "saved")):
        assert len(found) == 4
        for case, (seen, wanted, error) in found.items():
            assert seen == pytest.approx(wanted, rel=1e-5), case
            assert error <= 1e-5, (case, error)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"moe_load_balancing": "sinkhorn"}, "moe_load_balancing='sinkhorn'.*the router stays Hugging Face's"),
        ({"moe_load_balancing": "aux_los"}, "did you mean aux_loss"),
        ({"smp_moe": False}, r"smp_moe=False\): only True works"),
        ({"moe_z_loss_coeff": 0.1}, r"moe_z_loss_coeff=0.1\): only 0.0 works"),
        ({"global_token_shuffle": True}, "global_token_shuffle=True"),
        ({"moe_all_to_all_dispatcher": False}, "moe_all_to_all_dispatcher=False"),
    ],
)
def test_what_a_moe_config_cannot_say(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        smp.MoEConfig(**given)
    assert "\n" not in str(caught.value)
