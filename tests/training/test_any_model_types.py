"""52 types of transformers through ``finetune.py`` beside a plain loop, and the table of the docs that says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from smp.config import ConfigError
from smp.hf.planning.module_plan import dropouts, make_plan
from smp.hf.planning.share import Share
from tests.hf import architectures
from tests.parity.result import TOLERANCE
from tests.training.any_model_lab import VOCAB, class_of
from tests.training.any_model_table import (
    CHUNK,
    SHARE,
    TYPES,
    chunks,
    measure,
    part_of_a_rank,
    shown,
    written,
)

pytest.importorskip("transformers")


def test_the_table_has_every_type_and_no_number_above_the_tolerance() -> None:
    found = written()
    assert tuple(found) == TYPES
    every = [cell for cells in found.values() for cell in cells.values()]
    numbers = [float(cell) for cell in every if re.fullmatch(r"\d+e[-+]\d+", cell)]
    assert len(numbers) > 7 * len(TYPES) and max(numbers) <= TOLERANCE


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
