"""Settings of a run: the schema, flags and YAML, derived defaults and checks. Imports neither torch nor YAML."""

from smp.config.cli import as_flat_dict, load_config, to_yaml
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
