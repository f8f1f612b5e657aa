"""The keys of ``smp.init``: SMP v2's, and one line for everything else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import smp
from smp.config import ConfigError
from smp.hf.settings import LAUNCHER, NO_EFFECT, Settings, layout_of, read
from smp.hf.state import State
from tests.distributed import run_distributed
from tests.hf.families import batch, build


def test_the_keys_and_their_defaults() -> None:
    settings, unused = read(None)
    assert vars(settings) == {
        "hybrid_shard_degree": 0,
        "sm_activation_offloading": True,
        "activation_loading_horizon": 2,
        "fsdp_cache_flush_warnings": True,
        "allow_empty_shards": False,
        "tensor_parallel_degree": 1,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
        "random_seed": None,
        "sequence_parallel": False,  # of this project
    }
    assert unused == []


def test_keys_come_from_a_dict_a_file_and_the_launcher_which_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"tensor_parallel_degree": 2, "random_seed": 5}
    (tmp_path / "smp.json").write_text(json.dumps(given))
    assert read(given) == read(str(tmp_path / "smp.json")) == read(tmp_path / "smp.json")
    assert read(given) == (Settings(tensor_parallel_degree=2, random_seed=5), ["random_seed"])
    monkeypatch.setenv(LAUNCHER, json.dumps({"tensor_parallel_degree": 4}))
    assert read(given)[0].tensor_parallel_degree == 4 and read(None)[0].tensor_parallel_degree == 4


def test_degrees_that_a_script_has_assigned_to_the_state_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER, json.dumps({"tensor_parallel_degree": 4}))
    state = State()
    state.tensor_parallel_degree = 1  # type: ignore[misc]
    assert state.tensor_parallel_degree == 1
    assert read(None, state._set_before)[0].tensor_parallel_degree == 1
    with pytest.raises(AttributeError, match="cannot be set: give the key to smp.init"):
        state.hybrid_shard_degree = 2  # type: ignore[misc]


def test_keys_that_change_nothing_are_told() -> None:
    given = {key: getattr(Settings(), key) for key in NO_EFFECT}
    assert read(given)[1] == list(NO_EFFECT)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_paralel_degree": 2}, "no key tensor_paralel_degree: did you mean tensor_parallel_degree"),
        ({1: 2}, "no key 1; there are hybrid_shard_degree"),
        ([("tensor_parallel_degree", 2)], "a dictionary or the path of a JSON file, not list"),
        ({"zzz": 2}, "no key zzz; there are hybrid_shard_degree"),
        ({"tensor_parallel_degree": "2"}, "tensor_parallel_degree is an integer, not '2'"),
        ({"tensor_parallel_degree": True}, "tensor_parallel_degree is an integer, not True"),
        ({"allow_empty_shards": 1}, "allow_empty_shards is true or false, not 1"),
        ({"tensor_parallel_degree": 0}, "tensor_parallel_degree 0: at least 1"),
        ({"hybrid_shard_degree": -1}, "hybrid_shard_degree -1: at least 0"),
        ({"pipeline_parallel_degree": 1}, "which has no stages; .*--pipeline-model-parallel-size"),
        ({"partitions": 2}, "which has no stages"),
        ({"sequence_parallel": True}, "cuts tokens over the ranks of tensor_parallel_degree, which is 1"),
        ({"sequence_parallel_degree": 2}, "give sequence_parallel: true"),
        ({"context_parallel_degree": 0}, "context_parallel_degree 0: at least 1"),
        ({"expert_parallel_degree": 0}, "expert_parallel_degree 0: at least 1"),
        ("nowhere.json", "No such file or directory: nowhere.json"),
    ],
)
def test_a_mistake_is_one_line(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(given)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    for text, message in ((b"{", "is no JSON"), (b"[1]", "no JSON object"), (b"\xff\xfe", "is no text in UTF-8")):
        (tmp_path / "smp.json").write_bytes(text)
        with pytest.raises(ConfigError, match=message):
            read(tmp_path / "smp.json")


@pytest.mark.parametrize(
    ("tp", "shard", "expected"),
    [(1, 0, (1, 8, 1)), (2, 0, (1, 4, 2)), (2, 1, (4, 1, 2)), (2, 2, (2, 2, 2)), (8, 0, (1, 1, 8))],
)
def test_degrees_divide_the_processes(tp: int, shard: int, expected: tuple[int, int, int]) -> None:
    layout = layout_of(Settings(tensor_parallel_degree=tp, hybrid_shard_degree=shard), 8)
    assert (layout.dp_replicate, layout.dp_shard, layout.tp) == expected


def test_degrees_that_do_not() -> None:
    with pytest.raises(ConfigError, match="expert_parallel_degree 2 does not divide hybrid_shard_degree 1"):
        layout_of(Settings(expert_parallel_degree=2, hybrid_shard_degree=1), 8)
    assert layout_of(Settings(expert_parallel_degree=2), 8).ep == 2
    with pytest.raises(ConfigError, match="does not divide 1 processes; start them with torchrun --nproc-per-node N"):
        layout_of(Settings(tensor_parallel_degree=2), 1)
    with pytest.raises(ConfigError, match="tensor_parallel_degree 3 does not divide 8 processes"):
        layout_of(Settings(tensor_parallel_degree=3), 8)
    with pytest.raises(ConfigError, match="hybrid_shard_degree 8 does not divide 4 data ranks"):
        layout_of(Settings(tensor_parallel_degree=2, hybrid_shard_degree=8), 8)


def test_import_smp_loads_no_torch() -> None:
    program = "import smp, sys; assert 'transform' in dir(smp); assert 'torch' not in sys.modules; smp.nothing"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "AttributeError: module 'smp' has no attribute 'nothing'" in run.stderr


def _threads_of_a_loop(rank: int, world_size: int) -> list[int]:
    threads = []
    for shard in (0, 1, 0, 1, 0, 1):
        smp.state.reset()
        smp.init({"tensor_parallel_degree": 2, "hybrid_shard_degree": shard})
        smp.transform(build("Llama"))(**batch(1)).loss.backward()
        threads.append(len(list(Path("/proc/self/task").iterdir())))
    return threads


def test_a_loop_over_models_has_no_more_threads_at_its_end() -> None:
    for threads in run_distributed(_threads_of_a_loop, 2):
        assert len(set(threads[1:])) == 1, threads
