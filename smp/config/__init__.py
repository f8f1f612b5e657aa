"""Settings of a run: the schema, flags and YAML, derived defaults and checks. Imports neither torch nor YAML.

Read :mod:`smp.config.schema` first: the tree of dataclasses, with ``model``, ``parallel`` and others for its parts.
``resolve`` derives defaults, :mod:`smp.config.rules` checks, ``layers`` says which layer is what,
:mod:`smp.config.command_line` turns flags into settings, :mod:`smp.config.megatron` does so with Megatron's.
"""

from smp.config.command_line.cli import as_flat_dict, load_config, to_yaml
from smp.config.layout import Layout
from smp.config.model import ModelConfig
from smp.config.parallel import ParallelConfig
from smp.config.resolve import check_files, resolve, resolve_model
from smp.config.schema import (
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    LoggingConfig,
    OptimizerConfig,
    TrainingConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "Layout",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainingConfig",
    "as_flat_dict",
    "check_files",
    "load_config",
    "resolve",
    "resolve_model",
    "to_yaml",
]
