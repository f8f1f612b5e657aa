"""What FP8 refuses, in one line that names the flag and what works."""

from __future__ import annotations

import pytest

from smp.config import Config, ConfigError
from smp.config.rules.fp8 import layers_in_bf16
from smp.models.presets import PRESETS
from smp.training.settings import read_settings

BASE = (
    "--mock-data --vocab-size 64 --num-layers 4 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 "
    "--seq-length 256 --max-position-embeddings 1024 --train-iters 2 "
)
FP8 = "--fp8-format hybrid --bf16 "
FP4 = "--fp8-format e2m1 --fp8-recipe nvfp4 --bf16 "


ALONE = FP8 + (
    "--num-experts 4 --moe-ffn-hidden-size 64 --tensor-model-parallel-size 4 --sequence-parallel "
    "--expert-tensor-parallel-size 1 "
)
"""Nothing but experts can be sharded."""


def read(flags: str, processes: int = 4) -> Config:
    return read_settings((BASE + flags).split(), PRESETS, processes)


@pytest.mark.parametrize(
    "flags",
    [
        FP8,
        FP8 + "--fp8-recipe rowwise --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full",
        FP8 + "--fp8-recipe tensorwise --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
        "--fp8-format e4m3 --fp8-emulate --fp8-recipe blockwise --num-query-groups 2 --tensor-model-parallel-size 2 "
        "--kv-channels 128",
        FP8 + "--fp8-amax-history-len 1 --fp8-amax-compute-algo most_recent --context-parallel-size 2",
        FP8 + "--compile --fp8-param-gather",
        FP4 + "--fp8-emulate --seq-length 250 --tensor-model-parallel-size 2 --compile",
        FP8 + "--multi-latent-attention --kv-lora-rank 32 --tensor-model-parallel-size 2 --sequence-parallel",
        FP8 + "--num-experts 4 --moe-ffn-hidden-size 64 --expert-model-parallel-size 2",
        FP8 + "--num-experts 4 --moe-ffn-hidden-size 64 --compile",
        ALONE + "--expert-model-parallel-size 2 --fp8-param-gather",  # experts alone are sharded, over two processes
    ],
)
def test_what_works_is_taken(flags: str) -> None:
    assert read(flags).parallel.fp8_format


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--fp8-emulate", "--fp8-emulate has no effect without --fp8-format"),
        ("--fp8-recipe rowwise", "--fp8-recipe rowwise has no effect without --fp8-format"),
        ("--fp8-amax-history-len 3", "--fp8-amax-history-len 3 has no effect without --fp8-format"),
        (FP8 + "--fp8-recipe rowwise --fp8-amax-history-len 3", "has no effect without --fp8-recipe delayed"),
        (FP8 + "--num-layers-at-end-in-bf16 2", "has no effect without --first-last-layers-bf16"),
        (FP8 + "--fp8-recipe rowwise --fp8-param-gather", "--fp8-param-gather has no effect without --fp8-recipe"),
        ("--fp8-param-gather", "--fp8-param-gather has no effect without --fp8-format"),
        (FP8 + "--fp8-param-gather --hybrid-shard-degree 1", "no weights are sharded"),
        (ALONE + "--expert-model-parallel-size 4 --fp8-param-gather", "no weights are sharded"),
        (
            FP8 + "--fp8-param-gather --data-parallel-collectives hierarchical",
            "--data-parallel-collectives hierarchical has gathers of its own",
        ),
        (
            FP8 + "--multi-latent-attention --kv-lora-rank 24 --qk-head-dim 64",
            "multiples of 16: --kv-lora-rank is 24",
        ),
        (
            FP8 + "--fp8-emulate --fp8-recipe blockwise --multi-latent-attention --kv-lora-rank 128 --qk-head-dim 64 "
            "--qk-pos-emb-head-dim 128 --v-head-dim 128 --tensor-model-parallel-size 4 --sequence-parallel",
            "a process projects 64 tokens to the latents",
        ),
        (FP8 + "--fp8-emulate --fp8-recipe blockwise --num-experts 4", "an expert has any number of tokens"),
        (FP8 + "--num-experts 4 --moe-ffn-hidden-size 40", "multiples of 16: --moe-ffn-hidden-size is 40"),
        (
            FP8 + "--num-experts 4 --moe-shared-expert-intermediate-size 48 --tensor-model-parallel-size 2",
            "--moe-shared-expert-intermediate-size is 24 on each of 2 tensor-parallel processes",
        ),
        ("--fp8-format hybrid", "on tensor cores gives results in bf16: give --bf16"),
        (FP8 + "--fp8-recipe blockwise", "--fp8-emulate computes it"),
        (FP8 + "--fp8-recipe mxfp8", "--fp8-emulate computes it"),
        (FP8 + "--fp8-emulate --fp8-recipe mxfp8 --num-experts 4", "delayed, tensorwise and rowwise work"),
        (FP8 + "--fp8-emulate --fp8-recipe mxfp8 --seq-length 200", "is not a multiple of its blocks of 32 tokens"),
        (
            FP8 + "--fp8-emulate --fp8-recipe blockwise --seq-length 200",
            "is not a multiple of its blocks of 128 tokens",
        ),
        (
            FP8 + "--fp8-emulate --fp8-recipe blockwise --context-parallel-size 2",
            "--seq-length 256 / (2 x --context-parallel-size 2) = 64 is not",
        ),
        (FP8 + "--fp8-emulate --fp8-recipe nvfp4", "e2m1 is the format of nvfp4, and its only one"),
        ("--bf16 --fp8-emulate --fp8-format e2m1", "with --fp8-recipe delayed: e2m1 is the format of nvfp4"),
        (FP4, "--fp8-recipe nvfp4: tensor cores are not used for it yet; --fp8-emulate computes it"),
        (
            FP4 + "--fp8-emulate --num-experts 4",
            "products of experts take one scale of a matrix, or scales of its rows",
        ),
        (FP4 + "--fp8-emulate --ffn-hidden-size 520", "multiples of 16: --ffn-hidden-size is 520"),
        (FP8 + "--ffn-hidden-size 520", "multiples of 16: --ffn-hidden-size is 520"),
        (
            FP8 + "--fp8-emulate --fp8-recipe blockwise --tensor-model-parallel-size 4",
            "--num-attention-heads x --kv-channels is 64 on each of 4 tensor-parallel processes",
        ),
        (FP8 + "--num-query-groups 2 --tensor-model-parallel-size 4", "--tensor-model-parallel-size 2 works"),
        (
            FP8 + "--tensor-model-parallel-size 4 --sequence-parallel --seq-length 254",
            "--seq-length 254 to be divisible by --tensor-model-parallel-size 4",
        ),
        (
            FP8 + "--first-last-layers-bf16 --num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 2",
            "leaves none of 4 layers for FP8",
        ),
        (FP8 + "--num-layers-at-start-in-bf16 -1 --first-last-layers-bf16", "must not be negative"),
    ],
)
def test_what_does_not_is_refused_in_one_line(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(flags)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_numbers_of_the_layers_that_stay() -> None:
    flags = FP8 + "--num-layers 6 --first-last-layers-bf16 --num-layers-at-end-in-bf16 2"
    assert layers_in_bf16(read(flags).parallel, 6) == [0, 4, 5]
    assert layers_in_bf16(read(FP8).parallel, 6) == []
