"""Checks of offloading."""

from __future__ import annotations

from smp.config.command_line.fields import given, require
from smp.config.schema import Config


def check_offload(config: Config) -> None:
    """Check the settings of a run with its defaults filled in.

    Raises:
        ConfigError: one line that names the flag, and what works.
    """
    parallel, optim = config.parallel, config.optim
    small = given(optim, "exp_avg_dtype", "exp_avg_sq_dtype")
    require(
        not (optim.optimizer_cpu_offload and small),
        f"--optimizer-cpu-offload keeps Adam's moments in fp32 on the host; leave out {', '.join(small)}",
    )
    if not parallel.offload_activations:
        return
    recompute, schedule = parallel.recompute_granularity, parallel.pipeline_schedule
    # Selective recompute keeps results in its own cache, which saved-tensor hooks do not see.
    require(
        recompute != "selective",
        "--offload-activations: --recompute-granularity selective keeps results where offloading cannot reach them; "
        "full and none work",
    )
    require(
        not parallel.compile,
        "--offload-activations and --compile exclude each other: compiled code manages its activations itself; "
        "leave out one",
    )
    # Delayed weight gradients read their inputs after the block's backward pass.
    if recompute == "none":
        require(
            schedule not in ("zb-h1", "zb-v"),
            f"--offload-activations with --pipeline-schedule {schedule} needs --recompute-granularity full: what "
            "weight gradients need stays on the device until they are computed",
        )
    size = given(parallel, "min_offloaded_tensor_size")
    require(
        recompute == "none" or not size,
        f"{''.join(size)} has no effect with --recompute-granularity full, which offloads every block's input; "
        "leave it out",
    )
    layers, horizon = config.model.num_layers, parallel.activation_loading_horizon
    require(
        horizon < layers or parallel.pipeline_model_parallel_size > 1,
        f"--activation-loading-horizon {horizon} with --num-layers {layers} keeps all activations on the device; give "
        "less, or leave out --offload-activations",
    )
