"""A script that was written for SMP v2 imports what it imports."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

import smp
from smp.config import ConfigError
from smp.hf.sagemaker.compat import HERE, INSTEAD
from tests.distributed import run_distributed
from tests.hf.families import build, gradients, worst

pytest.importorskip("transformers")
PAGE = Path(__file__).parents[2] / "docs/transform.md"


def _script(rank: int, world_size: int) -> None:
    smp.compat.install()
    smp.compat.install()
    import torch.sagemaker as tsm
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
        offload_wrapper,
    )
    from torch.sagemaker import transform
    from torch.sagemaker.delayed_param import DelayedParamIniter
    from torch.sagemaker.grad_norm import clip_grad_norm_
    from torch.sagemaker.logger import get_logger
    from torch.sagemaker.moe.moe_config import MoEConfig
    from torch.sagemaker.tensor_parallel.transformer import TransformerLayer
    from torch.sagemaker.utils.process_group_utils import get_global_ranks

    assert transform is smp.transform and DelayedParamIniter is smp.delayed_param.DelayedParamIniter
    assert clip_grad_norm_ is smp.clip_grad_norm_ and get_logger().name == "smp"
    for symbol in [*HERE, *INSTEAD]:
        path, _, name = f"torch.sagemaker.{symbol}".rpartition(".")
        found = getattr(import_module(path), name)
        if symbol in INSTEAD:
            with pytest.raises(ConfigError, match=re.escape(INSTEAD[symbol])) as caught:
                found(1, some=2)
            assert "\n" not in str(caught.value)
    assert MoEConfig is smp.MoEConfig
    with pytest.raises(AttributeError, match="smp has no torch.sagemaker.nothing"):
        _ = tsm.nothing
    tsm.init({"tensor_parallel_degree": 2})
    assert get_global_ranks(tsm.state.tp_process_group) == [0, 1]
    plain = build("Llama")
    wanted = gradients(copy.deepcopy(plain), 2)
    with pytest.raises(ConfigError, match=r"transform\(config=dict\): a smp.MoEConfig"):
        transform(plain, config={"smp_moe": True})
    model = transform(plain, config=None, load_state_dict_from_rank0=False, cp_comm_type="p2p")
    assert [isinstance(m, TransformerLayer) for m in (model.model.layers[0], model.lm_head)] == [True, False]
    with pytest.raises(ConfigError, match="FullyShardedDataParallel does not take a model with .* instead of it: for"):
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    model.config.use_cache = False  # or the forward pass that is run again would append to it
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, TransformerLayer))
    found = gradients(offload_wrapper(model), 2)
    names = {name.replace("_checkpoint_wrapped_module.", ""): tensor for name, tensor in found.items()}
    assert worst(names, wanted)[0] <= 1e-5


def test_an_smp_v2_script_imports_what_it_imports() -> None:
    run_distributed(_script, 2)


def test_nothing_is_installed_unasked() -> None:
    program = "import smp, smp.hf.transform, sys; assert 'torch.sagemaker' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


_SEEN = """from torch.sagemaker.distributed.fsdp import checkpoint
import smdistributed.dataparallel.torch.torch_smddp
from torch.sagemaker.distributed.fsdp.checkpoint import EXPORT_KEY_TOKENS, save_model_checkpoint
from torch.sagemaker.distributed.checkpoint.s3_filesystem import is_s3_uri
from torch.sagemaker.moe.moe_layer import MoELayer
from torch.sagemaker.tensor_parallel.utils import register_tp_processing_pre_comm_hook
from torch.sagemaker.utils import utils as tsm_utils
import smdistributed.modelparallel.torch as v1
"""


def test_modules_of_other_versions_import_and_say_so_when_they_are_used() -> None:
    program = f"""import smp
smp.compat.install()
{_SEEN}
import torch.distributed as dist
assert is_s3_uri("s3://a/b") and not is_s3_uri("/a") and dist.Backend("smddp") == "smddp"
for use in (lambda: MoELayer(1), lambda: exec("class A(MoELayer): pass"), lambda: isinstance(1, MoELayer),
            lambda: checkpoint.save_model_checkpoint(), lambda: f"{{EXPORT_KEY_TOKENS}}",
            lambda: register_tp_processing_pre_comm_hook(1), lambda: tsm_utils.other.more,
            lambda: v1.init(), lambda: v1.step(print)):
    try:
        use()
    except smp.hf.sagemaker.compat.ConfigError as error:
        assert "does not exist here: " in str(error), error
    else:
        raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_page_says_what_became_of_every_symbol() -> None:
    table = PAGE.read_text(encoding="utf-8").split("## From SMP v2")[1]
    missing = [symbol for symbol in [*HERE, *INSTEAD] if symbol.rpartition(".")[2] not in table]
    assert not missing, missing
