"""The region of a shard holds the elements that torch really put there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from smp.config import Layout
from smp.layers.parameter import tp_parameter
from smp.parallel.dtensor_region import local_region
from smp.parallel.region import Region, chunk
from smp.sharding.parallelize import shard
from tests.fake_group import fake_context
from tests.layers.whole import load

DEGREES = st.integers(1, 4)


@given(st.integers(0, 50), st.integers(1, 12))
def test_chunk_cuts_like_torch(size: int, parts: int) -> None:
    pieces = torch.arange(size).chunk(parts)
    for index in range(parts):
        start, length = chunk(size, parts, index)
        want = pieces[index].tolist() if index < len(pieces) else []
        assert list(range(start, start + length)) == want


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 3),
    placement=st.sampled_from([Shard(0), Shard(1), Replicate()]),
    degrees=st.tuples(st.integers(1, 2), DEGREES, DEGREES),
    data=st.data(),
)
def test_region_of_a_sharded_parameter_holds_its_elements(
    rows: int, columns: int, placement: Placement, degrees: tuple[int, int, int], data: st.DataObject
) -> None:
    """Elements are their own numbers; FSDP and TP cut them, evenly or not."""
    replicate, shards, tp = degrees
    layout = Layout(dp_replicate=replicate, dp_shard=shards, tp=tp)
    shape = (rows * tp, columns * tp)
    whole = torch.arange(float(shape[0] * shape[1])).view(shape)
    with fake_context(layout, rank=data.draw(st.integers(0, layout.world_size - 1))) as context:
        model = nn.Module()
        model.weight = tp_parameter(shape, placement, context.tp)
        load(model.weight, whole)
        shard(model, [], context.fsdp)
        assert isinstance(model.weight, DTensor)
        region, held = local_region(model.weight), model.weight.to_local()
    (top, left), (height, width) = region.offsets, region.sizes
    assert torch.equal(whole[top : top + height, left : left + width], held)
    assert region.empty == (held.numel() == 0)


def test_region_of_a_plain_tensor_is_all_of_it() -> None:
    assert local_region(torch.zeros(3, 4)) == Region((0, 0), (3, 4))
    assert local_region(torch.zeros(())) == Region((), ())


def test_both_dimensions_may_be_cut() -> None:
    with fake_context(Layout(dp_shard=2, tp=2), rank=3):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        x = distribute_tensor(torch.zeros(5, 6), mesh, [Shard(0), Shard(1)], src_data_rank=None)
        assert local_region(x) == Region((3, 3), (2, 3))


def test_a_partial_sum_has_no_region() -> None:
    with fake_context(Layout(tp=2)) as context:
        x = DTensor.from_local(torch.zeros(3), context.tp, [Partial()])
        with pytest.raises(ValueError, match="has no region"):
            local_region(x)
