"""Measure families, by default all, and write the table of docs/measurements/transform.md, from the repository's root.

OMP_NUM_THREADS=1 python -m tests.hf.table [FAMILY ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.distributed import run_distributed
from tests.hf.families import FAMILIES

PAGE = Path("docs/measurements/transform.md")
BEGIN = "<!-- table: written by python -m tests.hf.table -->"
END = "<!-- end of table -->"
HEADER = [
    "| family | built from | TP 2: logits | gradients | weights after 10 steps | TP 4: logits | gradients | weights |",
    "|---|---|---:|---:|---:|---:|---:|---:|",
]
_SHOWN = ("logits", "gradients", "weights")


def families_in(page: str) -> dict[str, str]:
    """The lines of the table by family, in its order."""
    lines = [line for line in page.split(BEGIN)[1].split(END)[0].splitlines() if "Config" in line]
    return {line.split("|")[1].strip(): line for line in lines}


def main(families: list[str]) -> None:
    """The largest error of any rank."""
    from tests.hf.test_families import _compare

    ranks = run_distributed(_compare, 4, families, (1, 2, 4), 10, timeout=1800.0)
    worst: dict[str, dict[str, float]] = {}
    for results in ranks:
        for case, errors, _ in results:
            known = worst.setdefault(case, dict.fromkeys(errors, 0.0))
            worst[case] = {key: max(known[key], value) for key, value in errors.items()}
    page = PAGE.read_text(encoding="utf-8")
    rows = families_in(page)
    for family in families:
        errors = [worst[f"{family}, TP {tp}"][key] for tp in (2, 4) for key in _SHOWN]
        assert max(max(worst[f"{family}, TP {tp}"].values()) for tp in (1, 2, 4)) <= 1e-5, family
        numbers = " | ".join(f"{error:.0e}" for error in errors)
        rows[family] = f"| {family} | `{FAMILIES[family][0]}` | {numbers} |"
    head, rest = page.split(BEGIN)
    table = "\n".join([*HEADER, *(rows[family] for family in FAMILIES)])
    PAGE.write_text(f"{head}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or list(FAMILIES))
