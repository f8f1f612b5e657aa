"""References between keys: what is resolved without OmegaConf is what OmegaConf says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp.launch.references import UnresolvedError, resolved

pytest.importorskip("omegaconf")
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

NAMES = st.sampled_from(["a", "b", "c", "d_1"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(".".join)
DOTS = st.sampled_from(["", ".", "..", "..."])
REFERENCES = st.tuples(DOTS, PATHS).map(lambda parts: f"${{{parts[0]}{parts[1]}}}")
TEXTS = st.lists(st.one_of(REFERENCES, st.sampled_from(["x", "/", " ", "\\", "$", "{", "???"])), max_size=3).map(
    "".join
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([0.5, 1e-5]), TEXTS)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.dictionaries(NAMES, inner, max_size=4), st.lists(inner, max_size=2)),
    max_leaves=12,
)


@settings(max_examples=2000, deadline=None)
@given(st.dictionaries(NAMES, TREES, min_size=1, max_size=4))
def test_as_omegaconf(tree: dict[str, Any]) -> None:
    try:
        found: Any = resolved(tree)
    except UnresolvedError as error:
        if "refers to itself" in str(error):
            return  # OmegaConf does not end where sections refer to each other
        found = error
    try:
        expected = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException:
        assert isinstance(found, UnresolvedError)
        return
    assert found == expected


@pytest.mark.parametrize(
    "tree", [{"a": "${b}", "b": "${a}"}, {"a": {"b": "${a}"}}, {"a": {"a": "${b}"}, "b": {"a": "x${a}"}}]
)
def test_what_refers_to_itself_is_an_error(tree: dict[str, Any]) -> None:
    with pytest.raises(UnresolvedError, match="refers to itself"):
        resolved(tree)


def test_plain_references_need_no_omegaconf() -> None:
    tree = {"base": "/fsx", "run": {"name": "x", "dir": "${base}/${.name}", "same": "${..base}"}, "n": "${run.dir}"}
    assert resolved(tree) == {"base": "/fsx", "run": {"name": "x", "dir": "/fsx/x", "same": "/fsx"}, "n": "/fsx/x"}
    code = (
        f"import sys; from smp.launch.references import resolved; resolved({tree}); print('omegaconf' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_functions_of_recipes() -> None:
    assert resolved({"a": 8, "b": "${multiply:${a},2}", "c": "${oc.select:x.y,7}"}) == {"a": 8, "b": 16, "c": 7}
