"""Into how many parts each dimension of the mesh is split, checked before any process group exists."""

from __future__ import annotations

from dataclasses import dataclass

from smp.config.parallel import ParallelConfig
from smp.config.schema import ConfigError


@dataclass(frozen=True)
class Layout:
    """Degrees of the mesh ``(pp, dp_replicate, dp_shard, cp, tp)``; the last one varies fastest over ranks. ``ep``,
    over which experts are spread, is no dimension of its own: experts lie on ``dp_shard x cp x tp`` as
    ``expert_shard x ep x etp``, where ``etp`` cuts their width; None: it is ``tp``."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int | None = None

    @property
    def expert_tp(self) -> int:
        """Number of processes that cut an expert's width."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_shard(self) -> int:
        """Number of processes over which FSDP shards an expert, without replicas."""
        # Experts use the processes of dp_shard x cp and of the tp that does not cut them; ep of
        # these have different experts.
        return self.dp_shard * self.cp * (self.tp // self.expert_tp) // self.ep

    @property
    def has_fsdp(self) -> bool:
        """Whether weights are sharded or replicated by FSDP, which parts of a pipeline always have."""
        return self.pp * self.data_parallel * self.cp * self.expert_shard > 1

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
        pp, cp = parallel.pipeline_model_parallel_size, parallel.context_parallel_size
        if min(tp, pp, cp) < 1 or degree < 0:
            raise ConfigError(
                f"--tensor-model-parallel-size {tp}, --pipeline-model-parallel-size {pp}, --context-parallel-size {cp} "
                f"and --hybrid-shard-degree {degree}: out of range"
            )
        sizes = {
            "--tensor-model-parallel-size": tp,
            "--pipeline-model-parallel-size": pp,
            "--context-parallel-size": cp,
        }
        used = {flag: size for flag, size in sizes.items() if size > 1}
        product = tp * pp * cp
        text = " x ".join(f"{flag} {size}" for flag, size in used.items()) + f" = {product}" * (len(used) > 1)
        if world_size % product:
            raise ConfigError(
                f"{world_size} processes are not divisible by {text}; change {', '.join(used)} or --nproc-per-node"
            )
        data = world_size // product
        # 0 means all data-parallel processes.
        shard = degree or data
        if data % shard:
            raise ConfigError(
                f"{data} data-parallel processes{f' ({world_size} processes / ({text}))' if used else ''} are not "
                f"divisible by --hybrid-shard-degree {shard}; change --hybrid-shard-degree or --nproc-per-node"
            )
        # Experts are spread over the ranks that shard weights, never over replicas.
        ep, etp = _of_experts(parallel, shard)
        return Layout(pp=pp, dp_replicate=data // shard, dp_shard=shard, cp=cp, tp=tp, ep=ep, etp=etp)


def _of_experts(parallel: ParallelConfig, shard: int) -> tuple[int, int | None]:
    """``ep`` and ``etp`` for ``shard`` processes that shard weights; an ``etp`` equal to ``tp`` becomes None.

    Raises:
        ConfigError: experts cannot be spread so.
    """
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    if etp is not None and (etp < 1 or tp % etp):
        raise ConfigError(
            f"--expert-tensor-parallel-size {etp} has to divide --tensor-model-parallel-size {tp}; change one of them"
        )
    # tp / etp processes of a tensor-parallel group have different experts.
    tp_per_etp = 1 if etp is None else tp // etp
    # ep ranks lie within dp_shard x cp and the tensor-parallel ranks that do not cut experts.
    if ep < 1 or shard * cp * tp_per_etp % ep:
        factors = f"{shard} processes that shard weights"
        factors += f" x --context-parallel-size {cp}" if cp > 1 else ""
        factors += f" x {tp_per_etp} of --expert-tensor-parallel-size {etp}" if tp_per_etp > 1 else ""
        factors += f" = {shard * cp * tp_per_etp}" if cp * tp_per_etp > 1 else ""
        raise ConfigError(
            f"--expert-model-parallel-size {ep} has to divide the {factors}; change it, --hybrid-shard-degree or "
            "--nproc-per-node"
        )
    if tp_per_etp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"--expert-tensor-parallel-size {etp} below --tensor-model-parallel-size {tp} needs --sequence-parallel: "
            "without it all tensor-parallel processes would send the same tokens; give it"
        )
    return ep, None if tp_per_etp == 1 else etp
