"""FullyShardedDataParallel around a transformed model, after ``smp.compat.install()``: training, norms and checkpoints
equal one process. Without it: refused."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, offload_wrapper
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import smp
from smp.config import ConfigError
from smp.hf.sagemaker.checkpoint import AsyncCallsQueue, async_save, init_optim_state, load, save
from smp.hf.sagemaker.compat import TransformerLayer
from tests.distributed import run_distributed
from tests.hf.families import FAMILIES, VOCAB, build, whole, worst

transformers = pytest.importorskip("transformers")
STEPS, SAVED = 4, 2
CPU = torch.device("cpu")


def _ids(step: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (4, 10), generator=torch.Generator().manual_seed(step))


def _optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def _train(model: Any, optimizer: Any, steps: range, clip: Any) -> list[float]:
    norms = []
    for step in steps:
        ids = _ids(step).chunk(smp.state.dp_size)[smp.state.dp_rank]
        model(input_ids=ids, labels=ids, use_cache=False)["loss"].backward()
        norms.append(float(clip(model, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def _wrapped(model: Any, recompute: bool = True, **options: Any) -> Any:
    """As SMP v2's scripts do it."""
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer})
    options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "use_orig_params": True, "device_id": CPU} | options
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)
    if recompute:
        apply_activation_checkpointing(wrapped, check_fn=lambda module: isinstance(module, TransformerLayer))
    return wrapped


def _whole(model: Any) -> dict[str, torch.Tensor]:
    config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        return model.state_dict()


def _error(model: Any, weights: dict[str, torch.Tensor]) -> tuple[float, str] | None:
    """Where whole weights are: on rank 0, and others with the same place in their copy; every rank calls this."""
    found = _whole(model)
    return worst(found, weights) if found else None


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        return {"model": model.state_dict(), "optimizer": moments}


def _save(model: Any, optimizer: Any, folder: Path) -> None:
    """At once by all ranks, or in the background by the first copy."""
    content = _state(model, optimizer) | {"total_steps": SAVED, "cli_args": {"lr": [1, None]}, "config": model.config}
    queue = AsyncCallsQueue()
    if smp.state.ranker.writers is None:
        save(content, checkpoint_id=folder / f"tp2-{smp.state.tp_rank}")
    elif smp.state.ranker.get_rep_rank(smp.state.rank) == 0:
        async_save(content, checkpoint_id=folder, queue=queue)
    else:
        _refused("get_rep_rank", lambda: save(content, checkpoint_id=folder))
    assert queue.maybe_finalize_async_calls(blocking=True) == ([0] if queue.saver else [])
    torch.distributed.barrier()


def _resume(model: Any, optimizer: Any, folder: Path) -> int:
    init_optim_state(optimizer, skip_empty_param=True)
    content = _state(model, optimizer) | {"total_steps": 0}
    load(content, checkpoint_id=folder)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(content["model"])
        moments = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, content["optimizer"])
    optimizer.load_state_dict(moments)
    return int(content["total_steps"])


def _restart(tp: int, shard: int) -> None:
    smp.state.reset()
    smp.init({"tensor_parallel_degree": tp, "hybrid_shard_degree": shard})


def _refused(message: str, call: Any) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def _without_install(fresh: Any, wanted: list[float]) -> None:
    """With one tensor-parallel rank torch's is right; with several it is refused at the first forward pass."""
    _restart(1, 0)
    model = _wrapped(smp.transform(copy.deepcopy(fresh)), sharding_strategy=ShardingStrategy.FULL_SHARD)
    assert _train(model, _optimizer(model), range(STEPS), smp.clip_grad_norm_) == pytest.approx(wanted, rel=1e-5)
    _refused("see FSDP.state_dict_type", lambda: model.module.save_pretrained("nowhere"))
    _restart(2, 2)
    options = {"device_mesh": smp.state.data_mesh, "sharding_strategy": ShardingStrategy.FULL_SHARD}
    model = _wrapped(smp.transform(copy.deepcopy(fresh)), recompute=False, **options)
    _refused("does not know of tensor_parallel_degree.*fully_shard.layer", lambda: model(input_ids=_ids(0)))
    smp.compat.install()


def _mistakes(fresh: Any) -> None:
    _restart(2, 1)
    unsharded = smp.transform(copy.deepcopy(fresh))
    _refused("hybrid_shard_degree 1, NO_SHARD", lambda: FullyShardedDataParallel(unsharded))
    _restart(2, 2)
    _refused("is not cut over tensor_parallel_degree 2", lambda: FullyShardedDataParallel(copy.deepcopy(fresh)))
    model = smp.transform(copy.deepcopy(fresh))
    group = torch.distributed.group.WORLD
    _refused("leave both out", lambda: FullyShardedDataParallel(model, process_group=group))
    _refused("needs True", lambda: FullyShardedDataParallel(model, use_orig_params=False))
    tied = smp.transform(build("Qwen2"))
    _refused("lm_head.weight, which are tied", lambda: _wrapped(tied))
    wrapped = _wrapped(model)
    _refused("StateDictType.SHARDED", lambda: FullyShardedDataParallel.optim_state_dict_to_load(
        wrapped, None, {"state": {"lm_head.weight": {"exp_avg": torch.zeros(4, 4)}}, "param_groups": []}
    ))  # fmt: skip


def _compare(rank: int, world_size: int, path: str) -> dict[str, Any]:
    folder, fresh = Path(path), build("Qwen3")
    _restart(4, 0)  # every rank has all rows
    alone = copy.deepcopy(fresh)
    wanted = _train(alone, _optimizer(alone), range(STEPS), smp.clip_grad_norm_)
    _without_install(fresh, wanted)
    weights = {name: p.detach() for name, p in alone.state_dict().items()}
    found: dict[str, Any] = {}
    for tp, shard in ((2, 2), (1, 2), (1, 0)):
        _restart(tp, shard)
        model = _wrapped(smp.transform(copy.deepcopy(fresh)))
        optimizer = _optimizer(model)
        norms = _train(model, optimizer, range(SAVED), smp.clip_grad_norm_)
        if shard:
            _save(model, optimizer, folder / f"tp{tp} of {shard}")
        norms += _train(offload_wrapper(model), optimizer, range(SAVED, STEPS), lambda m, n: m.clip_grad_norm_(n))
        found[f"tp {tp} x {shard}"] = norms, _error(model, weights)
    for tp, shard, saved in ((2, 2, "tp2 of 2"), (1, 2, "tp2 of 2"), (2, 2, "tp1 of 2")):
        _restart(tp, shard)
        torch.manual_seed(rank)
        model = _wrapped(smp.transform(build("Qwen3")))
        optimizer = _optimizer(model)
        step = _resume(model, optimizer, folder / saved)
        norms = wanted[:step] + _train(model, optimizer, range(step, STEPS), smp.clip_grad_norm_)
        found[f"{saved} resumed at tp {tp}"] = norms, _error(model, weights)
    _mistakes(fresh)
    return {"wanted": wanted, "found": found}


@pytest.mark.slow
def test_fsdp1_equals_one_process(tmp_path: Path) -> None:
    for rank, result in enumerate(run_distributed(_compare, 4, str(tmp_path))):
        assert len(result["found"]) == 6
        for case, (norms, weights) in result["found"].items():
            assert norms == pytest.approx(result["wanted"], rel=1e-5), case
            assert weights is not None or rank > 0, case
            assert weights is None or weights[0] <= 1e-5, (case, weights)


SCRIPTS = ["Llama", "Mistral, sliding window", "GPT-NeoX", "Mixtral"]
"""Those that AWS's own training script was run with."""


def _on_meta(family: str, tp: int, shard: int) -> Any:
    _restart(tp, shard)
    config, values = FAMILIES[family]
    with torch.device("meta"):
        return smp.transform(transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**values)))


def _delayed(family: str, tp: int, shard: int, seed: int) -> Any:
    """The model of an SMP v2 script: on the meta device until FSDP1 wraps it."""
    model = _on_meta(family, tp, shard)
    initer = smp.delayed_param.DelayedParamIniter(model, seed)
    with initer.validate_params_and_buffers_inited():
        return _wrapped(
            model, param_init_fn=initer.get_param_init_fn(), post_param_init_fn=initer.get_post_param_init_fn()
        )


def _fine_tuned(model: Any) -> Any:
    """The model of an SMP v2 script that fine-tunes: rank 0 has the weights."""
    _restart(2, 2)
    rank = smp.state.rank
    smp.transform(model.to("meta") if rank else model, load_state_dict_from_rank0=True)
    init = smp.delayed_param.DelayedParamIniter(model).get_param_init_fn() if rank else None
    return _wrapped(model, param_init_fn=init, sync_module_states=True)


def _scripts(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Delayed init, recompute, training, a checkpoint, and resuming at the same and another degree; fine-tuning."""
    smp.compat.install()
    found: dict[str, Any] = {}
    for family in SCRIPTS:
        folder = Path(path, family)
        drawn = _on_meta(family, 4, 0)  # every rank has all rows
        smp.delayed_param.DelayedParamIniter(drawn, 1).init()
        alone = build(family)
        alone.load_state_dict({name: whole(tensor) for name, tensor in drawn.state_dict().items()})
        fresh = copy.deepcopy(alone)
        wanted = _train(alone, _optimizer(alone), range(STEPS), smp.clip_grad_norm_)
        weights = {name: p.detach() for name, p in alone.state_dict().items()}
        model = _delayed(family, 2, 2, seed=1)
        optimizer = _optimizer(model)
        norms = _train(model, optimizer, range(SAVED), smp.clip_grad_norm_)
        _save(model, optimizer, folder)
        norms += _train(model, optimizer, range(SAVED, STEPS), smp.clip_grad_norm_)
        found[family] = wanted, norms, _error(model, weights)
        for tp in (2, 1):
            model = _delayed(family, tp, 2, seed=2)
            optimizer = _optimizer(model)
            step = _resume(model, optimizer, folder)
            norms = wanted[:step] + _train(model, optimizer, range(step, STEPS), smp.clip_grad_norm_)
            found[f"{family}, resumed at tp {tp}"] = wanted, norms, _error(model, weights)
        model = _fine_tuned(fresh)
        norms = _train(model, _optimizer(model), range(STEPS), smp.clip_grad_norm_)
        found[f"{family}, fine-tuned"] = wanted, norms, _error(model, weights)
    return found


@pytest.mark.slow
def test_families_of_smp_v2_scripts(tmp_path: Path) -> None:
    for rank, found in enumerate(run_distributed(_scripts, 4, str(tmp_path))):
        assert len(found) == 4 * len(SCRIPTS)
        for case, (wanted, norms, weights) in found.items():
            assert norms == pytest.approx(wanted, rel=1e-5), case
            assert weights is not None or rank > 0, case
            assert weights is None or weights[0] <= 1e-5, (case, weights)
