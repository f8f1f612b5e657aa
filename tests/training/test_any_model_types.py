"""54 types of transformers through ``finetune.py`` beside a plain loop, and the table of the docs that says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from smp.config import ConfigError
from smp.hf.planning.module_plan import dropouts, make_plan
from smp.hf.planning.share import Share
from tests.distributed import run_distributed
from tests.hf import architectures
from tests.parity.result import TOLERANCE
from tests.training.any_model_lab import VOCAB, class_of, largest_error, plain_loop, tune_types, write_type
from tests.training.any_model_table import (
    CHUNK,
    CUT,
    SHARE,
    STEPS,
    TYPES,
    chunks,
    measure,
    part_of_a_rank,
    shown,
    written,
)
from tests.training.tuning_lab import together

pytest.importorskip("transformers")


def test_the_table_has_every_type_and_no_number_above_the_tolerance() -> None:
    found = written()
    assert tuple(found) == TYPES
    every = [cell for cells in found.values() for cell in cells.values()]
    numbers = [float(cell) for cell in every if re.fullmatch(r"\d+e[-+]\d+", cell)]
    assert len(numbers) > 7 * len(TYPES) and max(numbers) <= TOLERANCE
    assert not any(cell.startswith("warned") for cell in every), "each type is cut or refused"


def share_of(kind: str) -> Share:
    """What a plan for two tensor-parallel ranks cuts of a tiny model of a type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = architectures.tiny(CONFIG_MAPPING[kind])
    config.vocab_size = VOCAB
    with torch.device("meta"):
        model = class_of(config).from_config(config)
    for owner, name, _ in list(dropouts(model)):
        setattr(owner.config if owner is model else owner, name.rpartition(".")[2], 0.0)
    return Share.of(model, make_plan(model, None, 2, 0))


def test_a_rank_of_two_has_what_the_table_says_and_hears_where_that_is_more_than_its_share() -> None:
    for kind, cells in written().items():
        said = cells[SHARE]
        try:
            share = share_of(kind)
        except ConfigError as error:
            assert said.startswith("refused"), (kind, error)
            continue
        if said.startswith("refused"):  # in a run, by what this is not asked
            continue
        assert said == part_of_a_rank((share.total - share.cut / 2) / share.total), kind
        warned = any(line.startswith("warning:") for line in share.lines(2))
        assert warned == said.startswith("warned"), (kind, share.lines(2))


def test_matrices_of_experts_and_of_mixers_that_kernels_read_are_cut(tmp_path: Path) -> None:
    """JetMoE's experts have an interface of their own; Mamba-2's output matrix goes to a fused kernel."""
    kinds = ("jetmoe", "mamba2")
    folders = {kind: write_type(tmp_path / kind, kind) for kind in kinds}
    flags = [
        f"--load {folder} --data-path {folder}/sft.jsonl --log-dir {folder}/logs {STEPS} --weight-decay 0 "
        f"--model-implementation transformers --packing off --tensor-model-parallel-size 2"
        for folder in folders.values()
    ]
    ranks = run_distributed(tune_types, 2, flags)
    for i, kind in enumerate(kinds):
        run = together([rank[i] for rank in ranks])
        errors = largest_error(run, plain_loop(folders[kind], run["batches"]))
        assert max(errors.values()) <= TOLERANCE and run["share"] <= CUT, (kind, errors, run["share"])


def test_experts_that_the_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="input_linear: 4 experts are not divisible by tensor_parallel_degree 3"):
        make_plan(architectures.build("jetmoe"), None, 3, 0)


@pytest.mark.slow
@pytest.mark.parametrize("some", [*chunks(TYPES)], ids=[f"{i * CHUNK}" for i, _ in enumerate(chunks(TYPES))])
def test_types_are_as_the_table_says(some: tuple[str, ...], tmp_path: Path) -> None:
    rows = written()
    for kind, cells in measure(some, tmp_path).items():
        for column, cell in cells.items():
            said = rows[kind][column]
            if column == SHARE:
                assert said == shown(cell), (kind, cell, said)
                continue
            assert isinstance(cell, float) == said[0].isdigit(), (kind, column, cell, said)
            assert not isinstance(cell, float) or cell <= TOLERANCE, (kind, column, cell)
