"""Random schedules for hypothesis."""

from hypothesis import strategies as st

from smp.pipeline.schedules import SCHEDULES

Sizes = tuple[str, int, int, int]


@st.composite
def sizes(draw: st.DrawFn, most_ranks: int = 16, most_micro_batches: int = 64, names: tuple[str, ...] = ()) -> Sizes:
    """Name, pipeline ranks, micro-batches and chunks that the schedule takes."""
    name = draw(st.sampled_from(names or tuple(SCHEDULES)))
    chunks = draw(st.integers(2, 4)) if name == "interleaved" else SCHEDULES[name].CHUNKS
    return name, draw(st.integers(1, most_ranks)), draw(st.integers(1, most_micro_batches)), chunks


times = st.integers(1, 9)
