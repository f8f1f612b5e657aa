"""Degrees from settings and the number of processes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp.config import ConfigError, Layout, ParallelConfig


@pytest.mark.parametrize(
    ("tp", "degree", "world_size", "expected"),
    [
        (1, 0, 1, Layout()),
        (1, 0, 8, Layout(dp_shard=8)),
        (1, 1, 8, Layout(dp_replicate=8)),
        (2, 2, 8, Layout(dp_replicate=2, dp_shard=2, tp=2)),
        (4, 0, 8, Layout(dp_shard=2, tp=4)),
        (8, 1, 8, Layout(tp=8)),
    ],
)
def test_degrees_follow_from_the_settings(tp, degree, world_size, expected):
    parallel = ParallelConfig(tensor_model_parallel_size=tp, hybrid_shard_degree=degree)
    assert Layout.from_config(parallel, world_size) == expected


@given(tp=st.integers(1, 9), degree=st.integers(0, 9), world_size=st.integers(1, 72))
def test_a_layout_uses_every_process_or_is_refused(tp, degree, world_size):
    parallel = ParallelConfig(tensor_model_parallel_size=tp, hybrid_shard_degree=degree)
    fits = world_size % tp == 0 and (world_size // tp) % (degree or 1) == 0
    if not fits:
        with pytest.raises(ConfigError, match="are not divisible by --.*change --.* or --nproc-per-node"):
            Layout.from_config(parallel, world_size)
        return
    layout = Layout.from_config(parallel, world_size)
    assert layout.world_size == world_size
    assert layout.data_parallel == world_size // tp
    assert layout.dp_shard == (degree or layout.data_parallel)


def test_the_error_shows_the_product_and_the_flag_to_change():
    with pytest.raises(ConfigError) as caught:
        Layout.from_config(ParallelConfig(tensor_model_parallel_size=3), 4)
    assert str(caught.value) == (
        "4 processes are not divisible by --tensor-model-parallel-size 3; change --tensor-model-parallel-size or "
        "--nproc-per-node"
    )
    with pytest.raises(ConfigError) as caught:
        Layout.from_config(ParallelConfig(tensor_model_parallel_size=2, hybrid_shard_degree=3), 8)
    assert str(caught.value) == (
        "4 data-parallel processes (8 processes / (--tensor-model-parallel-size 2)) are not divisible by "
        "--hybrid-shard-degree 3; change --hybrid-shard-degree or --nproc-per-node"
    )


@pytest.mark.parametrize(("tp", "degree"), [(0, 0), (-1, 0), (1, -1)])
def test_degrees_out_of_range_are_refused(tp, degree):
    parallel = ParallelConfig(tensor_model_parallel_size=tp, hybrid_shard_degree=degree)
    with pytest.raises(ConfigError, match=f"--tensor-model-parallel-size {tp}, .* --hybrid-shard-degree {degree}: out"):
        Layout.from_config(parallel, 4)


def test_a_pipeline_takes_its_share_of_the_processes():
    parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, hybrid_shard_degree=1)
    assert Layout.from_config(parallel, 8) == Layout(pp=2, dp_replicate=2, tp=2)
    message = "6 processes are not divisible by .*-size 2 x --pipeline-model-parallel-size 2 = 4; change"
    with pytest.raises(ConfigError, match=message):
        Layout.from_config(parallel, 6)
    with pytest.raises(ConfigError, match="--pipeline-model-parallel-size 0"):
        Layout.from_config(ParallelConfig(pipeline_model_parallel_size=0), 1)


def test_context_parallelism_takes_its_share_of_the_processes():
    parallel = ParallelConfig(context_parallel_size=2, pipeline_model_parallel_size=2, hybrid_shard_degree=1)
    layout = Layout.from_config(parallel, 8)
    assert layout == Layout(pp=2, dp_replicate=2, cp=2)
    assert (layout.world_size, layout.data_parallel) == (8, 2)
    assert Layout.from_config(ParallelConfig(context_parallel_size=4), 8) == Layout(dp_shard=2, cp=4)
    with pytest.raises(ConfigError) as caught:
        Layout.from_config(ParallelConfig(context_parallel_size=4, tensor_model_parallel_size=2), 12)
    assert str(caught.value) == (
        "12 processes are not divisible by --tensor-model-parallel-size 2 x --context-parallel-size 4 = 8; "
        "change --tensor-model-parallel-size, --context-parallel-size or --nproc-per-node"
    )
    with pytest.raises(ConfigError, match="--context-parallel-size 0 and"):
        Layout.from_config(ParallelConfig(context_parallel_size=0), 1)
