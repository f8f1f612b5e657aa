"""How much of an architecture is cut at TP 2, whether its folder loads part by part, and whether its first values are
those of ``from_config``: columns of docs/transform-models.md."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import smp
import smp.checkpoint
from smp.config import ConfigError
from smp.hf.planning.module_plan import make_plan
from smp.hf.planning.share import Share
from tests.hf.architectures import architectures, build, tiny
from tests.hf.families import whole
from tests.hf.first_value_distance import beyond_chance

COLUMNS = ("cut", "load", "delayed init")


def measure_weights(rank: int, world_size: int, kinds: list[str]) -> dict[str, dict[str, str]]:
    """By model type and column: the share, or "equal", or why not; of types that cannot be built nothing."""
    found = {}
    for kind in kinds:
        smp.state.reset()
        try:
            model = build(kind)
        except Exception:  # models raise what they like
            continue
        config = copy.deepcopy(model.config)
        found[kind] = {"cut": _share(model), "load": _loaded(model, config, rank)}
        found[kind]["delayed init"] = _drawn(kind) if rank == 0 else ""
    return found


def _share(model: Any) -> str:
    try:
        return f"{Share.of(model, make_plan(model, None, 2, 0)).fraction:.0%}"
    except ConfigError as refused:
        return str(refused)


def _loaded(reference: Any, config: Any, rank: int) -> str:
    """At TP 2, what rank 0 has saved; and what a model that was loaded so saves again."""
    folders = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folders)
    if rank == 0:
        reference.save_pretrained(folders[0])
    dist.barrier()
    smp.init({"tensor_parallel_degree": 2})
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            with torch.device("meta"):
                model = type(reference)(config)
            smp.transform(model, allow_whole_layers=True)
            smp.load_weights(model, folders[0])
    except (ConfigError, smp.checkpoint.CheckpointError) as refused:
        return str(refused)
    wanted, found = reference.state_dict(), {name: whole(tensor) for name, tensor in model.state_dict().items()}
    assert "are not in the model" not in said.getvalue(), said.getvalue()
    assert found.keys() == wanted.keys(), wanted.keys() ^ found.keys()
    assert all(torch.equal(found[name], wanted[name].to(found[name].dtype)) for name in wanted)
    _check_buffers(reference, model)
    model.save_pretrained(f"{folders[0]}/again")
    if rank == 0:
        first, again = (load_file(f"{folder}/model.safetensors") for folder in (folders[0], f"{folders[0]}/again"))
        assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    return "equal"


def _check_buffers(reference: Any, model: Any) -> None:
    """Those that no folder has, such as frequencies of RoPE, are computed again: the meta device had none."""
    wanted = dict(reference.named_buffers())
    for name, buffer in model.named_buffers():
        found = whole(buffer)
        if name in wanted and found.shape == wanted[name].shape:  # some are cut
            assert torch.equal(found, wanted[name].to(found.dtype)), name


def _drawn(kind: str) -> str:
    import transformers  # only extras bring it

    model_class = getattr(transformers, architectures()[kind])
    try:
        differing = beyond_chance(model_class, tiny(model_class.config_class))
    except ConfigError as refused:
        return str(refused)
    assert not differing, (kind, differing)
    return "equal"
