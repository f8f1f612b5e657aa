"""What the server that ranks are forked from has imported, so that each of them need not: seconds of each rank.

torch imports its compiler at the first operation of a DTensor, and its checkpoints bring its whole launcher; a model of
transformers is a second. Nothing here starts a thread, which a fork would lose.
"""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path


def bring() -> None:
    """Import it, without the collector, which would walk all that is there again and again."""
    import pytest  # noqa: F401
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch.distributed.checkpoint  # noqa: F401

    import finetune  # noqa: F401
    import pretrain_gpt  # noqa: F401
    import smp
    import smp.training.launch
    import smp.training.pretraining
    import smp.training.tuning.kinds
    import tests.distributed  # noqa: F401
    from smp.config.command_line.cli import read_values
    from smp.config.command_line.entry_points import FINETUNE, PRETRAIN
    from smp.training.reporting.run_record import commit_of

    with contextlib.suppress(ImportError):  # which tests can do without
        from transformers import LlamaForCausalLM  # noqa: F401

        import smp.hf.run.model
    for entry_point in (PRETRAIN, FINETUNE):
        read_values([], entry_point, "")  # what is read from the schema's source, and a parser of hundreds of flags
    commit_of(Path(smp.__file__).parents[1])  # two programs of each run


gc.disable()
bring()
gc.enable()
gc.collect()
gc.freeze()  # no rank's garbage collector walks, and so copies, what all share
