"""Every setting of the layout, of precision, recompute and compilation: bytes, dtypes, operators and collectives."""

from __future__ import annotations

import math
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch.distributed.constants import default_pg_timeout

from smp.layers.block import TransformerBlock
from smp.models.presets import PRESETS
from smp.training.pretraining import Pretraining
from smp.training.process import Process
from smp.training.run import Run
from smp.training.runtime import StopSignal
from smp.training.settings import read_settings
from tests.distributed import run_distributed
from tests.operations import recorded
from tests.training.flag_runs import TINY, Runs, Watched, local, proves


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield Runs(tmp_path_factory.mktemp("parallel"))


def dtypes(run: Watched) -> dict[str, torch.dtype]:
    """Of a block's output, of the weight that a matrix product reads, and of what rests between steps."""
    seen: dict[str, torch.dtype] = {}
    block = run.trainer.model.layers["0"]  # type: ignore[union-attr, index]
    block.register_forward_hook(lambda module, args, out: seen.update(activation=out.dtype))
    up = block.mlp.up
    up.register_forward_pre_hook(lambda module, args: seen.update(computed=module.weight.dtype))
    run.trainer.train_step(next(run.batches))
    moments = {v.dtype for state in run.trainer.optimizer.state.values() for v in state.values()}
    assert moments == {torch.float32}
    return seen | {"resting": up.weight.dtype}


@proves("bf16")
def test_bf16_computes_in_bfloat16_and_rests_in_fp32(runs: Runs) -> None:
    plain, low = runs.fresh(probe=dtypes), runs.fresh("--bf16", probe=dtypes)
    assert set(plain.probed.values()) == {torch.float32}
    assert low.probed["resting"] == torch.float32
    assert low.probed["activation"] == torch.bfloat16
    assert low.losses != plain.losses and low.losses == pytest.approx(plain.losses, rel=0.02)


@proves("recompute_granularity")
def test_recompute_does_work_again_and_changes_no_bit(runs: Runs) -> None:
    """selective redoes norms and activations; full redoes matrix products and attention as well. By PyTorch's kernels,
    whose operations it counts."""
    none, selective, full = (
        runs(f"--kernels torch --recompute-granularity {g}", count_ops=True) for g in ("none", "selective", "full")
    )
    assert none.losses == selective.losses == full.losses
    passes, blocks = len(none.tokens), 2
    for cheap in ("silu", "rsqrt"):
        assert none.ops[cheap] < selective.ops[cheap] == full.ops[cheap]
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert none.ops["mm"] == selective.ops["mm"]
    # of a block's seven products the last, into the residual stream, need not be done again for its backward pass
    assert full.ops["mm"] - none.ops["mm"] == passes * blocks * 6
    assert full.ops[attention] == 2 * none.ops[attention] == 2 * selective.ops[attention]


@proves("compile")
def test_compile_compiles_each_block(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured; the backend that turns them into machine code is torch's affair, and slow."""
    compiled: list[Any] = []
    original = torch.compile

    def compile_eagerly(function: Any, **options: Any) -> Any:
        compiled.append(function)
        return original(function, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert runs.fresh().code == 0 and not compiled
    run = runs.fresh("--compile")
    assert sum(isinstance(getattr(f, "__self__", None), TransformerBlock) for f in compiled) == 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert run.losses == pytest.approx(runs().losses, rel=1e-5)


LAYOUTS = {
    "replicas": "--hybrid-shard-degree 1",
    "all": "--hybrid-shard-degree 0",
    "groups of two": "--hybrid-shard-degree 2",
    "tp": "--tensor-model-parallel-size 2",
    "sp": "--tensor-model-parallel-size 2 --sequence-parallel",
}
Measured = dict[str, dict[str, Any]]
COMMUNICATION = ("all_gather_into_tensor", "_allgather_base_", "reduce_scatter", "all_reduce", "allreduce")


def measure(flags: str, rank: int, world: int) -> dict[str, Any]:
    """What one layout costs a rank; the way of ``launch`` without its reports."""
    run = start(f"{flags} --cpu-collectives gloo", rank, world)  # whose operators can be counted
    rows: list[int] = []
    run.trainer.model.layers["1"].register_forward_hook(lambda module, args, out: rows.append(out.shape[0]))  # type: ignore[union-attr, index]
    shapes = {name: tuple(local(p).shape) for name, p in run.trainer.model.named_parameters()}
    losses = [run.trainer.train_step(next(run.batches)).loss]
    with torch.profiler.profile() as profile:  # sees inside of operators too
        losses.append(run.trainer.train_step(next(run.batches)).loss)
    ops = Counter(name for event in recorded(profile) if "c10d" in (name := event.name()))
    run.close()
    context = run.context
    groups = [mesh.get_group() for mesh in (context.tp, context.pp, *context.loss_meshes)]
    return {
        "losses": losses,
        "bytes": sum(4 * math.prod(shape) for shape in shapes.values()),
        "shapes": shapes,
        "rows": rows[0],
        "communication": {op.split("::")[1]: n for op, n in ops.items() if any(name in op for name in COMMUNICATION)},
        "timeouts": {group._get_backend(torch.device("cpu")).options._timeout for group in groups},
    }


def start(flags: str, rank: int, world: int) -> Run:
    config = read_settings([*TINY.split(), *flags.split()], PRESETS, world)
    return Run(Pretraining(config), Process(rank, world, rank), torch.device("cpu"), StopSignal())


def exchange(rank: int, world: int) -> dict[str, dict[str, Any]]:
    """What went through memory, the loss, and what was said, by --cpu-collectives."""
    found = {}
    for way in ("auto", "gloo"):
        said: list[str] = []
        flags = f"{TINY} --tensor-model-parallel-size 2 --cpu-collectives {way}"
        kind = type("Saying", (Run,), {"say": lambda self, line, said=said: said.append(line)})
        config = read_settings(flags.split(), PRESETS, world)
        run = kind(Pretraining(config), Process(rank, world, rank), torch.device("cpu"), StopSignal())
        group = run.context.tp.get_group()
        before = dict(getattr(group, "counts", {}))
        loss = run.trainer.train_step(next(run.batches)).loss
        counts = {k: n - before.get(k, 0) for k, n in group.counts.items()} if hasattr(group, "counts") else None
        run.close()
        lines = [line for line in said if line.startswith("collectives: ")]
        found[way] = {"counts": counts, "loss": loss, "said": lines}
    return found


def skip_on_one_rank(rank: int, world: int) -> list[tuple[bool, int, int]]:
    """(skipped, skipped iterations, nan iterations) after each of three steps; the second is NaN on rank 1."""
    run = start("--tensor-model-parallel-size 1", rank, world)
    out = []
    for i in range(3):
        poison = run.trainer.model.register_forward_hook(
            lambda module, args, out: out._replace(loss=out.loss * math.nan)
        )
        if rank == 0 or i != 1:
            poison.remove()
        result = run.trainer.train_step(next(run.batches))
        out.append((result.skipped, run.trainer.progress.skipped_iterations, run.trainer.progress.nan_iterations))
        poison.remove()
    run.close()
    return out


def stop_by_one_rank(rank: int, world: int) -> tuple[str, str, int]:
    """Outcome of a run in which only rank 1 gets SIGTERM, in its second step."""
    run = start("--train-iters 9 --save stopped", rank, world)
    run.console.step = lambda progress, result: (  # type: ignore[method-assign]
        os.kill(os.getpid(), signal.SIGTERM) if rank == 1 and progress.iteration == 2 else None
    )
    outcome = run.run()
    run.close()
    return outcome.status, outcome.reason, outcome.iteration


def measure_all(
    rank: int, world: int, folder: str
) -> tuple[Measured, list[tuple[bool, int, int]], tuple[str, str, int], dict[str, dict[str, Any]]]:
    os.chdir(folder)
    measured = {name: measure(flags, rank, world) for name, flags in LAYOUTS.items()}
    return measured, skip_on_one_rank(rank, world), stop_by_one_rank(rank, world), exchange(rank, world)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two ranks saw; one start of two processes for all."""
    return run_distributed(measure_all, 2, str(tmp_path_factory.mktemp("two")))


def test_the_layouts_train_alike(two: list[Any], runs: Runs) -> None:
    for measured, *_ in two:
        for name, got in measured.items():
            assert got["losses"] == pytest.approx(runs().losses[:2], rel=1e-5), name


@proves("cpu_collectives")
def test_cpu_collectives_are_what_tensors_go_through(two: list[Any], runs: Runs) -> None:
    for *_, shared in two:
        counts = shared["auto"]["counts"]
        assert counts.keys() == {"memory all-reduce", "memory all-gather"} and shared["gloo"]["counts"] is None
        assert counts["memory all-reduce"] >= 2 * 4  # two of each block in each pass
        assert shared["auto"]["said"] == ["collectives: shared memory (tp)"]
        assert shared["gloo"]["said"] == ["collectives: gloo (tp)"]
        # Sums of two have the same bits in any order.
        assert shared["auto"]["loss"] == shared["gloo"]["loss"] == pytest.approx(runs().losses[0], rel=1e-5)


@proves("hybrid_shard_degree")
def test_hybrid_shard_degree_is_how_many_hold_a_weight_together(two: list[Any]) -> None:
    """Four FSDP units: the embedding, two blocks, and the final norm with the head.

    Replicas keep everything and all-reduce each unit's gradients; shards keep half, gather each unit for the forward
    and the blocks again for the backward pass, and reduce-scatter its gradients. Three more all-reduces are of single
    numbers.
    """
    replicas, shards = two[0][0]["replicas"], two[0][0]["all"]
    assert shards["bytes"] * 2 == replicas["bytes"] == 4 * sum(map(math.prod, replicas["shapes"].values()))
    assert replicas["shapes"]["layers.0.mlp.up.weight"] == (64, 32)
    assert shards["shapes"]["layers.0.mlp.up.weight"] == (32, 32)
    assert replicas["communication"] == {"allreduce_": 4 + 3}
    assert shards["communication"] == {"allreduce_": 3, "_allgather_base_": 4 + 2, "_reduce_scatter_base_": 4}
    of_two = two[0][0]["groups of two"]
    assert (of_two["bytes"], of_two["communication"]) == (shards["bytes"], shards["communication"])


@proves("tensor_model_parallel_size")
def test_tensor_parallelism_halves_each_matrix(two: list[Any]) -> None:
    """Every matrix is halved, every norm kept; a block all-reduces twice in each direction, per micro-batch."""
    got = two[0][0]["tp"]
    assert got["shapes"]["layers.0.attention.query.weight"] == (16, 32)
    assert got["shapes"]["layers.0.mlp.down.weight"] == (32, 32)
    assert got["shapes"]["layers.0.mlp_norm.weight"] == (32,)
    assert got["communication"]["all_reduce"] >= 2 * 2 * 2 * 2
    assert got["rows"] == 2 * 17


@proves("sequence_parallel")
def test_sequence_parallelism_splits_the_residual_stream(two: list[Any]) -> None:
    """Each rank holds half of the tokens between blocks; all-reduces of activations become gathers and scatters."""
    tp, sp = two[0][0]["tp"], two[0][0]["sp"]
    assert (tp["rows"], sp["rows"]) == (34, 17)
    assert sp["bytes"] == tp["bytes"]
    assert "reduce_scatter_tensor" not in tp["communication"]
    assert sp["communication"]["reduce_scatter_tensor"] >= 2 * 2 * 2 * 2
    assert sp["communication"]["all_gather_into_tensor"] > tp["communication"]["all_gather_into_tensor"]


def test_a_nan_on_one_rank_is_skipped_on_all(two: list[Any]) -> None:
    expected = [(False, 0, 0), (True, 1, 1), (False, 1, 1)]
    assert [skips for _, skips, *_ in two] == [expected, expected]


def test_a_signal_to_one_rank_stops_all_at_the_same_iteration(two: list[Any]) -> None:
    reasons = ["stopped by a signal to another rank", "stopped by SIGTERM"]
    assert [stop for *_, stop, _ in two] == [("requeue", reason, 2) for reason in reasons]


def test_every_group_of_the_mesh_has_the_timeout_of_the_run(two: list[Any]) -> None:
    for measured, *_ in two:
        for name, got in measured.items():
            assert default_pg_timeout not in got["timeouts"], name
