"""How many ways each dimension of the mesh is split, checked before any process group exists."""

from __future__ import annotations

from dataclasses import dataclass

from smp.config.schema import ConfigError, ParallelConfig


@dataclass(frozen=True)
class Layout:
    """Degrees of the mesh ``(pp, dp_replicate, dp_shard, cp, tp)``; the last one varies fastest over ranks. ``ep``,
    over which experts are spread, is no dimension of its own: it divides ``dp_shard x cp``."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pp * self.data_parallel * self.cp * self.tp

    @property
    def data_parallel(self) -> int:
        """Number of processes that see different samples."""
        return self.dp_replicate * self.dp_shard

    @staticmethod
    def from_config(parallel: ParallelConfig, world_size: int) -> Layout:
        """The layout of ``world_size`` processes.

        Raises:
            ConfigError: the degrees do not multiply to the world size.
        """
        tp, degree = parallel.tensor_model_parallel_size, parallel.hybrid_shard_degree
        pp = parallel.pipeline_model_parallel_size
        if min(tp, pp) < 1 or degree < 0:
            raise ConfigError(
                f"--tensor-model-parallel-size {tp}, --pipeline-model-parallel-size {pp} and --hybrid-shard-degree "
                f"{degree}: out of range"
            )
        names, flags = f"tensor_model_parallel_size {tp}", "--tensor-model-parallel-size"
        if pp > 1:
            names += f" x pipeline_model_parallel_size {pp}"
            flags += ", --pipeline-model-parallel-size"
        if world_size % (tp * pp):
            raise ConfigError(
                f"{names} x data-parallel = {world_size} processes is impossible: {world_size} is not divisible by "
                f"{tp * pp}; change {flags} or --nproc-per-node"
            )
        data = world_size // (tp * pp)
        shard = degree or data
        if data % shard:
            raise ConfigError(
                f"hybrid_shard_degree {shard} x replicas = {data} data-parallel processes ({world_size} processes / "
                f"{names}) is impossible: {data} is not divisible by {shard}; change --hybrid-shard-degree or "
                "--nproc-per-node"
            )
        return Layout(pp=pp, dp_replicate=data // shard, dp_shard=shard, tp=tp)
