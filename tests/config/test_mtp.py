"""What layers of multi-token prediction ask of other settings, refused in one line that names the flag."""

from __future__ import annotations

import pytest

from smp.config import ConfigError, load_config, resolve

RUN = "--mock-data --vocab-size 100 --train-iters 1 --mtp-num-layers 1 "


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mtp-num-layers 0", "--mtp-num-layers 0 must be above 0"),
        ("--mtp-num-layers none --mtp-loss-scaling-factor 0.3", "has no effect without --mtp-num-layers"),
        ("--hidden-dropout 0.1", "--mtp-num-layers 1 and --hidden-dropout 0.1 exclude each other"),
        ("--position-embedding-type learned_absolute", "take rope or none"),
        ("--fp8-format hybrid --fp8-emulate", "--mtp-num-layers 1 and --fp8-format hybrid exclude each other"),
        ("--seq-length 2 --mtp-num-layers 2", "has no token so far ahead"),
    ],
)
def test_what_cannot_work(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(load_config([*RUN.split(), *flags.split()], {}), 1)
    assert message in str(error.value) and "\n" not in str(error.value)
