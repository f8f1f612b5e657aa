"""Settings of the layout over processes, of precision, recompute, offload and kernels. The rest of the tree is in
``smp.config.schema``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from smp.config.declare import GIVEN, Words, only_with


@dataclass
class ParallelConfig:
    """Layout over processes, precision, recompute and compilation."""

    tensor_model_parallel_size: int = 1
    """Tensor parallelism (TP): number of processes over which every matrix is split."""
    sequence_parallel: bool = only_with(False, noted=True, tensor_model_parallel_size=GIVEN)
    """Sequence parallelism (SP): split norms, dropout and the residual stream over the TP processes along the
    tokens."""
    pipeline_model_parallel_size: int = 1
    """Pipeline parallelism (PP): number of groups of processes, each with some consecutive layers."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] | None = None
    """Order of forward and backward passes. Default: interleaved with several stages per process, else 1f1b. zb-h1 and
    zb-v (zero bubble) fill waiting time with weight gradients."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Stages per process. Default: 2 with interleaved and zb-v, else 1."""
    pipeline_model_parallel_layout: str | None = None
    """Layers of each stage in Megatron's notation, such as Et*3|(tt|)*14tL: E embedding, t a layer, L output layer and
    loss, | next stage. Default: balanced by cost."""
    pipeline_reshard: bool = False
    """Free gathered weights after every use by a micro-batch, not once per step: less memory, more communication."""
    context_parallel_size: int = 1
    """Context parallelism (CP): number of processes over which every sequence is split. --seq-length must be divisible
    by twice this."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p", "auto"] = "auto"
    """What attention exchanges between context-parallel processes. p2p: keys and values move around a ring; all_gather:
    each process gets all keys and values; a2a: each process gets some heads of all tokens; a2a+p2p: a2a within small
    groups and p2p between them; auto: chosen by a cost model, and printed."""
    hierarchical_context_parallel_sizes: Words | None = None
    """Two numbers for a2a+p2p: processes per a2a group and per ring. Their product is --context-parallel-size."""
    expert_model_parallel_size: int = only_with(1, num_experts=GIVEN, transformers_config=GIVEN)
    """Expert parallelism (EP): number of processes over which the experts of each layer are spread. They are neighbours
    among the processes that shard weights. It must divide --num-experts and the number of those processes
    (--hybrid-shard-degree x --context-parallel-size x the part of tensor parallelism that --expert-tensor-parallel-size
    leaves)."""
    expert_tensor_parallel_size: int | None = only_with(None, num_experts=GIVEN)
    """Expert tensor parallelism (ETP): number of processes over which each expert is split, neighbours among the
    tensor-parallel ones. If it is below --tensor-model-parallel-size, the other TP processes have other experts or
    other shards of them, and tokens are sent by all-to-all (needs --sequence-parallel). Default:
    --tensor-model-parallel-size."""
    hybrid_shard_degree: int = 0
    """Processes over which hybrid FSDP shards weights, gradients and optimizer state, times --context-parallel-size.
    0: all data-parallel ones; 1: none (replicas only); n: groups of n, replicated."""
    min_nodes: int | None = only_with(None, max_nodes=GIVEN)
    """Fewest nodes that the run continues with when nodes leave. Default: 1."""
    max_nodes: int | None = None
    """The run is elastic: nodes may join up to this number, and leave, while it runs (torchrun --nnodes MIN:MAX). Batch
    size and learning rate stay; the data-parallel processes change. More nodes than this are spare ones, which wait."""
    replica_increment_step: int = only_with(1, max_nodes=GIVEN)
    """Numbers of nodes that the run may have: --min-nodes, and every so many more."""
    inprocess_restart: bool = only_with(False, peer_snapshot_interval=GIVEN)
    """Go on without a new start where a process is lost: the others keep what they have read, imported and compiled, a
    process that is held ready takes its place, and all continue from the newest copy of --peer-snapshot-interval."""
    inprocess_max_iterations: int | None = only_with(None, inprocess_restart=True)
    """So many times at most; then the run ends, and torchrun starts all processes again. Default: any number, as long
    as it comes further."""
    inprocess_heartbeat_timeout: float = only_with(60.0, inprocess_restart=True)
    """Seconds without a sign of life, or in a run that was lost, after which a process is killed and replaced."""
    inprocess_barrier_timeout: float = only_with(120.0, inprocess_restart=True)
    """Seconds that processes wait for each other after one was lost; then the run ends, and torchrun starts all
    again."""
    data_parallel_sharding_strategy: Literal["optim_grads_params", "optim_grads", "optim"] = "optim_grads_params"
    """What stays sharded over data-parallel processes between the micro-batches of a step. optim_grads_params:
    everything. optim_grads: weights are gathered once per step. optim: gradients are also reduced once per step. Less
    sharding takes more memory and less communication. A pipeline gathers and reduces once per step in any case, see
    --pipeline-reshard."""
    data_parallel_collectives: Literal["auto", "flat", "hierarchical"] = "flat"
    """How weights are gathered and gradients summed over data-parallel processes. flat: by gloo or NCCL; hierarchical:
    once over each node's uplink, then within nodes (CPU only, with several of the processes on a node); auto: the
    faster one for each size, predicted from links measured at the start. The choice is printed. hierarchical adds up in
    another order than flat."""
    cpu_collectives: Literal["auto", "gloo"] = "auto"
    """How processes on CPUs exchange tensors. auto: through memory between processes of one machine, by gloo between
    machines; gloo: by gloo everywhere. Sums of three and more processes have another order in each. What a run uses is
    printed."""
    network_topology: str | None = only_with(
        None, data_parallel_collectives=("auto", "hierarchical"), zero_hpz_partition_size=GIVEN
    )
    """JSON file with the processes of each node, the speed of links, or both. Default: nodes by hostname; auto measures
    the links."""
    zero_quantized_weights: bool = only_with(False, data_parallel_collectives="hierarchical")
    """ZeRO++ qwZ: send gathered weights as int8, with a scale per block of 128 numbers. Every process computes with the
    rounded weights; the weights that are trained and saved stay exact. The relative error is logged."""
    zero_quantized_gradients: bool = only_with(False, data_parallel_collectives="hierarchical")
    """ZeRO++ qgZ: send gradients between nodes as int8, with a scale per block of 128 numbers, after the sum within
    each node. Sums over replicas stay exact. The relative error is logged."""
    zero_hpz_partition_size: int = only_with(1, data_parallel_sharding_strategy="optim_grads_params")
    """ZeRO++ hpZ: this many neighbours on a node keep a second copy of the gathered weights, split over them, and the
    backward pass gathers within them: less traffic between nodes, more memory. It must divide --hybrid-shard-degree x
    --context-parallel-size. 1: off."""
    bf16: bool = False
    """Compute in bfloat16. Master weights, gradient reduction and optimizer stay in fp32. Without it everything is
    fp32, on CUDA with TF32 matrix products."""
    fp8_format: Literal["hybrid", "e4m3", "e2m1"] | None = None
    """Compute the linear layers of blocks in FP8. hybrid: inputs and weights in e4m3, gradients in e5m2 (more range);
    e4m3: all of them; e2m1: 4 bits, with --fp8-recipe nvfp4. The run prints what stays in higher precision. Default: no
    FP8."""
    fp8_recipe: Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"] = only_with(
        "delayed", fp8_format=GIVEN
    )
    """Which numbers share a scale. delayed: a tensor, from its maxima in past steps; tensorwise: a tensor of a
    micro-batch; rowwise: a token, or a row of a weight (weight gradients not in FP8); blockwise: 128 numbers of a
    token, 128 x 128 of a weight; mxfp8: 32 numbers along the summed dimension; nvfp4: 16 numbers of a token, 16 x 16 of
    a weight, with scales in e4m3 (weight gradients not in FP4). Other scales are powers of two. Only tensorwise and
    nvfp4 depend on the micro-batches."""
    fp8_amax_history_len: int = only_with(1024, fp8_recipe="delayed")
    """Delayed scaling: number of past steps whose maxima are kept."""
    fp8_amax_compute_algo: Literal["max", "most_recent"] = only_with("max", fp8_recipe="delayed")
    """Delayed scaling: scale from the largest maximum of these steps, or from the last step's."""
    fp8_emulate: bool = only_with(False, fp8_format=GIVEN)
    """Compute the same 8-bit numbers on any device: operands are rounded, products are in fp32. For tests and to try
    the effect of FP8 on a loss; slower than without FP8."""
    fp8_param_gather: bool = only_with(False, fp8_recipe=("delayed", "tensorwise"))
    """FP8: gather sharded weights as 8-bit numbers, 1 byte each. Same results, bit for bit."""
    first_last_layers_bf16: bool = only_with(False, fp8_format=GIVEN)
    """FP8: keep the first and the last layers in higher precision."""
    num_layers_at_start_in_bf16: int = only_with(1, first_last_layers_bf16=True)
    """FP8: number of first layers for --first-last-layers-bf16."""
    num_layers_at_end_in_bf16: int = only_with(1, first_last_layers_bf16=True)
    """FP8: number of last layers for --first-last-layers-bf16."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in the backward pass. selective keeps matrix products, attention and communication
    results; full keeps only each block's input."""
    offload_activations: bool = False
    """Keep what blocks save for the backward pass in host memory: with --recompute-granularity full their inputs, with
    none all saved activations. Copies run during the computation; results are the same."""
    activation_loading_horizon: int = only_with(2, offload_activations=True)
    """With --offload-activations: largest number of blocks whose activations are on the device at the same time. With 1
    each backward pass waits for its copy."""
    min_offloaded_tensor_size: int = only_with(1048576, offload_activations=True)
    """Smallest tensor, in elements, that --offload-activations moves to the host (with --recompute-granularity
    none)."""
    compile: bool = False
    """Compile each block with torch.compile."""
    kernels: Literal["auto", "torch", "triton", "cuda", "apex", "cpp"] = "auto"
    """Implementation of cross-entropy, norms, SwiGLU and RoPE. auto: Triton on CUDA and this project's C++ (cpp) on a
    CPU, where --compile does not fuse them, else PyTorch. triton, cuda, apex, cpp: that one where it has the operation,
    else as auto. The choice is printed."""
    attention_backend: Literal["auto", "flash", "cudnn", "efficient", "math", "cpp"] = "auto"
    """Backend of scaled dot-product attention: PyTorch's, or on a CPU this project's C++ (cpp). auto: the first that
    supports the model's attention, in an order that depends on the device. The choice is printed."""
    distributed_timeout_minutes: float = 10.0
    """Time after which a waiting collective ends the run. Each waiting rank prints its stack first."""
