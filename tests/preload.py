"""What the server that ranks are forked from has imported, so that each of them need not: seconds of each rank.

torch imports its compiler at the first operation of a DTensor. Nothing here starts a thread, which a fork would lose.
"""

from __future__ import annotations

import gc

import pytest  # noqa: F401
import torch._dynamo
import torch._inductor.compile_fx  # noqa: F401

import finetune  # noqa: F401
import pretrain_gpt  # noqa: F401
import smp.training.launch  # noqa: F401
import tests.distributed  # noqa: F401
from smp.config.entry_points import FINETUNE, PRETRAIN
from smp.config.fields import settings

for entry_point in (PRETRAIN, FINETUNE):
    settings(entry_point)  # read from the schema's source once
gc.collect()
gc.freeze()  # no rank's garbage collector walks, and so copies, what all share
