"""Save in one layout, load in another: parameters, Adam moments and step counts, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from smp.checkpoint import (
    CheckpointError,
    collect_logical_rows,
    load,
    read_manifest,
    restore_optimizer_scalars,
    save,
    training_state,
)
from smp.parallel.dtensor_region import local_region
from tests.checkpoint.layouts import (
    PADDING,
    SHAPES,
    VOCAB,
    Layout,
    Net,
    build,
    build_mesh,
    gathered,
    padded,
    tp_local,
    whole,
)
from tests.checkpoint.plain_reader import read_checkpoint
from tests.distributed import run_distributed

KINDS = ("model", "exp_avg", "exp_avg_sq")
STEPS = {f"{name}.weight": 3.0 for name in SHAPES}


def tensor_name(kind: str, name: str) -> str:
    return f"model.{name}.weight" if kind == "model" else f"optim.{kind}.{name}.weight"


def write_known(folder: Path) -> None:
    """The checkpoint that one process without a process group writes: every tensor whole."""
    state = {tensor_name(kind, name): padded(name, 1, kind) for kind in KINDS for name in SHAPES}
    rows = {tensor_name(kind, "embedding"): VOCAB for kind in KINDS}
    save(state, folder, extra={"steps": STEPS}, logical_rows=rows)


def fresh(layout: Layout | None) -> tuple[Net, torch.optim.Optimizer]:
    """Model and optimizer that know nothing yet."""
    mesh = None if layout is None else build_mesh(layout)
    model = build(mesh, 1 if layout is None else layout[2], "meta")
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def load_all(folder: Path, model: Net, optimizer: torch.optim.Optimizer) -> None:
    tensors, _ = training_state(model, optimizer)
    extra = load(tensors, folder, logical_rows=collect_logical_rows(model, optimizer))
    restore_optimizer_scalars(model, optimizer, extra["steps"])


def save_all(folder: Path, model: Net, optimizer: torch.optim.Optimizer) -> None:
    tensors, steps = training_state(model, optimizer)
    save(tensors, folder, extra={"steps": steps}, logical_rows=collect_logical_rows(model, optimizer))


def check_weights(model: Net, layout: Layout) -> None:
    """Against torch.chunk of the known whole tensors, gathered by FSDP and not by our arithmetic."""
    for name in SHAPES:
        expected = tp_local(name, getattr(model, name).weight.device_mesh, layout[2])
        assert torch.equal(gathered(model, name), expected), name


def check_steps(optimizer: torch.optim.Optimizer) -> None:
    assert {state["step"].item() for state in optimizer.state.values()} == {3.0}


def check_regions(layout: Layout) -> None:
    """local_region against the data that fully_shard really left on this rank."""
    for name, parameter in build(build_mesh(layout), layout[2], "cpu").named_parameters():
        assert isinstance(parameter, DTensor)
        region, local = local_region(parameter), parameter.to_local().detach()
        part = padded(name.split(".")[0], layout[2], "model")
        for dim, (offset, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        assert local.numel() == part.numel() and torch.equal(local.reshape(part.shape), part), (name, layout)


def run_layouts(rank: int, world_size: int, root: str, layouts: list[Layout], earlier: list[str]) -> None:
    """Every layout loads the checkpoints named ``earlier`` and saves its own; then every layout loads all of those."""
    own = {layout: "-".join(map(str, layout)) for layout in layouts}
    for layout in layouts:
        check_regions(layout)
        for name in earlier:
            model, optimizer = fresh(layout)
            load_all(Path(root, name), model, optimizer)
            check_weights(model, layout)
            check_steps(optimizer)
        save_all(Path(root, own[layout]), model, optimizer)
    for layout in layouts if len(layouts) > 1 else []:
        for name in own.values():
            model, optimizer = fresh(layout)
            load_all(Path(root, name), model, optimizer)
            check_weights(model, layout)


def check_folder(folder: Path) -> None:
    """The files hold exactly the known tensors, without padding, and are safetensors and JSON only."""
    tensors, extra = read_checkpoint(folder)
    assert extra == {"steps": STEPS}
    assert set(tensors) == {tensor_name(kind, name) for kind in KINDS for name in SHAPES}
    for kind in KINDS:
        for name in SHAPES:
            assert torch.equal(torch.from_numpy(tensors[tensor_name(kind, name)]), whole(name, kind)), (kind, name)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}


def test_every_layout_reads_every_other(tmp_path: Path) -> None:
    write_known(tmp_path / "1")
    run_distributed(run_layouts, 8, str(tmp_path), [(2, 2, 2), (1, 4, 2)], ["1"])
    run_distributed(run_layouts, 3, str(tmp_path), [(1, 3, 1)], ["1", "2-2-2"])
    four: list[Layout] = [(1, 2, 2), (2, 1, 2), (1, 4, 1), (1, 1, 4)]
    run_distributed(run_layouts, 4, str(tmp_path), four, ["1", "2-2-2", "1-4-2", "1-3-1"])
    for folder in sorted(tmp_path.iterdir()):
        check_folder(folder)
        model, optimizer = fresh(None)
        load_all(folder, model, optimizer)
        check_steps(optimizer)
        for name in SHAPES:
            weight = getattr(model, name).weight
            expected = padded(name, 1, "model")
            assert torch.equal(weight, expected), (folder, name)
            assert torch.equal(
                optimizer.state[weight]["exp_avg"][: len(whole(name, "exp_avg"))], whole(name, "exp_avg")
            )
        assert (model.embedding.weight[VOCAB:] == PADDING).all()
    sizes = read_manifest(tmp_path / "2-2-2").files
    assert len(sizes) == 8 and max(sizes.values()) < 2 * min(sizes.values()), "replicas did not share the writing"


def expect_error(call: object, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        call()  # type: ignore[operator]
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def check_gathered_model() -> None:
    """A forward without backward leaves the root's parameters gathered; the state is the sharded one nevertheless."""
    model, optimizer = fresh((1, 2, 1))
    shapes = {name: tensor.shape for name, tensor in training_state(model, optimizer)[0].items()}
    model.unshard()  # type: ignore[operator]
    tensors, _ = training_state(model, optimizer)
    assert {name: tensor.shape for name, tensor in tensors.items()} == shapes
    assert all(isinstance(tensor, DTensor) for tensor in tensors.values())


def run_errors(rank: int, world_size: int, root: str) -> None:
    """Whatever goes wrong on one rank is an error on both, and nobody hangs."""
    check_gathered_model()
    model, optimizer = fresh((1, 2, 1))
    load_all(Path(root, "1"), model, optimizer)
    tensors, rows = training_state(model, optimizer)[0], collect_logical_rows(model, optimizer)
    save(tensors, Path(root, "good"), extra={}, logical_rows=rows)

    only_here = {"model.new": torch.zeros(2)} if rank == 1 else {}
    expect_error(lambda: load(tensors | only_here, Path(root, "good"), logical_rows=rows), "model.new (missing")
    fewer = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    expect_error(lambda: load(fewer, Path(root, "good"), logical_rows=rows), "model.norm.weight (in the checkpoint but")
    load(fewer, Path(root, "good"), logical_rows=rows, allow_unread=True)
    load(tensors if rank == 1 else fewer, Path(root, "good"), logical_rows=rows)
    with pytest.raises(TypeError, match="step is of type float"):
        number: Any = {"step": 1.0} if rank == 1 else {}
        save(tensors | number, Path(root, "bad"), extra={}, logical_rows=rows)
    expect_error(lambda: save({"x": torch.zeros(2 + rank)}, Path(root, "bad"), extra={}), "ranks disagree about x")
    expect_error(lambda: load(tensors, Path(root, "absent")), "no checkpoint folder")

    victim = Path(root, "good", "shard_00001.safetensors")
    if rank == 0:
        damaged = bytearray(victim.read_bytes())
        damaged[-1] ^= 1
        victim.write_bytes(damaged)
    torch.distributed.barrier()
    expect_error(lambda: load(tensors, Path(root, "good"), logical_rows=rows), "shard_00001.safetensors", "checksum")
    save(tensors, Path(root, "good"), extra={"second": True}, logical_rows=rows)
    assert load(tensors, Path(root, "good"), logical_rows=rows) == {"second": True}


def test_errors_of_one_rank_reach_all(tmp_path: Path) -> None:
    write_known(tmp_path / "1")
    run_distributed(run_errors, 2, str(tmp_path))
    assert not (tmp_path / "bad" / "manifest.json").exists()
    assert sorted(path.name for path in (tmp_path / "good").iterdir()) == [
        "manifest.json",
        "shard_00000.1.safetensors",
        "shard_00001.1.safetensors",
    ]
