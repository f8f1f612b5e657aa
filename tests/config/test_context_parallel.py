"""What context parallelism asks of other settings, refused in one line that says what works."""

from __future__ import annotations

import pytest

from smp.config import ConfigError, ParallelConfig, load_config, resolve
from smp.config.rules.context_parallel import exchange_sizes

RUN = "--mock-data --vocab-size 100 --train-iters 1 --num-attention-heads 6 --hidden-size 48 --seq-length 48 "
TWO_BY_TWO = "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes"


def check(flags: str, world_size: int) -> None:
    resolve(load_config([*RUN.split(), *flags.split()], {}), world_size)


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("--context-parallel-size 4", 4),
        ("--context-parallel-size 3 --cp-comm-type a2a", 3),
        ("--context-parallel-size 2 --cp-comm-type a2a --position-embedding-type alibi", 2),
        ("--context-parallel-size 3 --cp-comm-type a2a --tensor-model-parallel-size 2", 12),
        ("--context-parallel-size 4 --cp-comm-type all_gather --pipeline-model-parallel-size 2", 8),
        (f"{TWO_BY_TWO} 2 2", 8),
        (f"{TWO_BY_TWO} 1 4", 4),
    ],
)
def test_what_works(flags: str, world_size: int) -> None:
    check(flags, world_size)


@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
    [
        ("--cp-comm-type p2p", 1, "--cp-comm-type p2p: sequences are not cut; give --context-parallel-size above 1"),
        (
            "--hierarchical-context-parallel-sizes 2 2",
            4,
            "--hierarchical-context-parallel-sizes 2 2: sequences are not",
        ),
        (
            "--context-parallel-size 4 --seq-length 44",
            4,
            "--seq-length 44 is not divisible by 2 x --context-parallel-size 4 = 8; 40 or 48 works",
        ),
        ("--context-parallel-size 8 --seq-length 9", 8, "2 x --context-parallel-size 8 = 16; 16 works"),
        (
            "--context-parallel-size 4 --cp-comm-type a2a",
            4,
            "--cp-comm-type a2a needs a multiple of 4 query heads on each process, not --num-attention-heads 6 = 6; "
            "--cp-comm-type p2p and all_gather work",
        ),
        (
            "--context-parallel-size 2 --cp-comm-type a2a --tensor-model-parallel-size 2",
            4,
            "--num-attention-heads 6 / --tensor-model-parallel-size 2 = 3; ",
        ),
        (
            "--context-parallel-size 3 --cp-comm-type a2a --linear-attention-type gated_delta_net "
            "--linear-num-key-heads 4 --linear-num-value-heads 8",
            3,
            "--cp-comm-type a2a needs a multiple of 3 key heads of the recurrence on each process, not "
            "--linear-num-key-heads 4 / --tensor-model-parallel-size 1 = 4; --cp-comm-type p2p and all_gather work",
        ),
        (f"{TWO_BY_TWO} 4 1", 4, "--cp-comm-type a2a+p2p needs a multiple of 4 query heads"),
        (
            "--context-parallel-size 2 --cp-comm-type p2p --position-embedding-type alibi",
            2,
            "which --position-embedding-type alibi is not written for; --cp-comm-type a2a works",
        ),
        (
            "--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 2",
            8,
            "--cp-comm-type a2a+p2p in groups of 4 needs a multiple of 4 query heads",
        ),
        (f"{TWO_BY_TWO} 2 4", 4, "2 4 does not fit: give two numbers, .* whose product is --context-parallel-size 4"),
        (f"{TWO_BY_TWO} 4", 4, "4 does not fit: give two numbers"),
        (f"{TWO_BY_TWO} 2 x", 4, "does not fit: give two numbers"),
        ("--context-parallel-size 4 --cp-comm-type a2a+p2p", 4, "--hierarchical-context-parallel-sizes is missing"),
        (
            "--context-parallel-size 4 --cp-comm-type a2a --hierarchical-context-parallel-sizes 2 2",
            4,
            r"sizes 2 2 is for --cp-comm-type a2a\+p2p, not a2a; leave it out",
        ),
        (
            "--context-parallel-size 2 --cp-comm-type p2p --compile --no-mock-data --data-path x "
            "--reset-attention-mask",
            2,
            "--cp-comm-type p2p computes documents block by block, which --compile .*--cp-comm-type a2a works",
        ),
        (
            "--context-parallel-size 3",
            4,
            "not divisible by --context-parallel-size 3; change --context-parallel-size or --nproc",
        ),
        ("--context-parallel-size 0", 4, "--context-parallel-size 0 and --hybrid-shard-degree 0: out of range"),
        ("--context-parallel-size 2 --cp-comm-type ring", 2, "--cp-comm-type: 'ring' is not one of p2p, all_gather"),
        ("--context-parallel-size 2 --cp-comm-type allgather", 2, "did you mean all_gather?"),
        ("--context-parallel-degree 2", 2, "did you mean --context-parallel-size?"),
    ],
)
def test_refusals_name_the_flag_and_what_works(flags: str, world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("a2a+p2p", r"a2a\+p2p") if "\\" not in message else message):
        check(flags, world_size)


@pytest.mark.parametrize(
    ("kind", "text", "sizes"),
    [("a2a", None, (4, 1)), ("p2p", None, (1, 4)), ("all_gather", None, (1, 4)), ("a2a+p2p", "2 2", (2, 2))],
)
def test_sizes_of_the_two_exchanges(kind: str, text: str | None, sizes: tuple[int, int]) -> None:
    parallel = ParallelConfig(
        context_parallel_size=4,
        cp_comm_type=kind,  # type: ignore[arg-type]
        hierarchical_context_parallel_sizes=text,
    )
    assert exchange_sizes(parallel) == sizes
