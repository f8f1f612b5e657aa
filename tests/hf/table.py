"""Measure every family and write the table of docs/transform.md, from the root of the repository.

OMP_NUM_THREADS=1 python -m tests.hf.table
"""

from __future__ import annotations

from pathlib import Path

from tests.distributed import run_distributed
from tests.hf.families import FAMILIES

PAGE = Path("docs/transform.md")
BEGIN = "<!-- table: written by python -m tests.hf.table -->"
END = "<!-- end of table -->"
HEADER = [
    "| family | built from | TP 2: logits | gradients | weights after 10 steps | TP 4: logits | gradients | weights |",
    "|---|---|---:|---:|---:|---:|---:|---:|",
]
_SHOWN = ("logits", "gradients", "weights")


def families_in(page: str) -> list[str]:
    """The families of the table, in its order."""
    return [line.split("|")[1].strip() for line in page.split(BEGIN)[1].split(END)[0].splitlines() if "Config" in line]


def main() -> None:
    """The largest error of any rank."""
    from tests.hf.test_families import _compare

    ranks = run_distributed(_compare, 4, list(FAMILIES), (1, 2, 4), 10, timeout=1800.0)
    worst: dict[str, dict[str, float]] = {}
    for results in ranks:
        for case, errors, _ in results:
            known = worst.setdefault(case, dict.fromkeys(errors, 0.0))
            worst[case] = {key: max(known[key], value) for key, value in errors.items()}
    rows = []
    for family, (config, _) in FAMILIES.items():
        errors = [worst[f"{family}, TP {tp}"][key] for tp in (2, 4) for key in _SHOWN]
        assert max(max(worst[f"{family}, TP {tp}"].values()) for tp in (1, 2, 4)) <= 1e-5, family
        numbers = " | ".join(f"{error:.0e}" for error in errors)
        rows.append(f"| {family} | `{config}` | {numbers} |")
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(BEGIN)
    table = "\n".join([*HEADER, *rows])
    PAGE.write_text(f"{head}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
