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
    """Processes that share every matrix (TP)."""
    sequence_parallel: bool = only_with(False, noted=True, tensor_model_parallel_size=GIVEN)
    """Split norms, dropout and the residual stream over the TP processes along the tokens."""
    pipeline_model_parallel_size: int = 1
    """Groups of processes that hold consecutive layers and pass activations on to each other (PP)."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] | None = None
    """Order of forward and backward passes. Default: interleaved with several stages per process, else 1f1b. zb-h1 and
    zb-v fill waiting time with weight gradients."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Stages per process. Default: 2 with interleaved and zb-v, else 1."""
    pipeline_model_parallel_layout: str | None = None
    """Layers of each stage in Megatron's notation, such as Et*3|(tt|)*14tL: E embedding, t a layer, L output layer and
    loss, | next stage. Default: balanced by cost."""
    pipeline_reshard: bool = False
    """Free gathered weights after every use by a micro-batch, not once per step: less memory, more communication."""
    context_parallel_size: int = 1
    """Processes that each hold a part of every sequence (CP): attention exchanges keys and values, or heads.
    --seq-length has to be divisible by twice this."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p", "auto"] = "auto"
    """What attention exchanges between context-parallel processes. p2p: keys and values travel round a ring;
    all_gather: each process gets all of them; a2a: each gets some heads of all tokens; a2a+p2p: a2a within small groups
    and p2p between them. auto: by a cost model, which is printed."""
    hierarchical_context_parallel_sizes: Words | None = None
    """Two numbers for a2a+p2p: processes of an a2a group, and of a ring. Their product is --context-parallel-size."""
    expert_model_parallel_size: int = only_with(1, num_experts=GIVEN)
    """Processes over which the experts of each layer are spread (EP), neighbours among those that shard weights: it has
    to divide them (--hybrid-shard-degree x --context-parallel-size, and what --expert-tensor-parallel-size leaves of
    tensor parallelism) and --num-experts."""
    expert_tensor_parallel_size: int | None = only_with(None, num_experts=GIVEN)
    """Processes over which each expert's width is cut (ETP), neighbours among the tensor-parallel ones. Below
    --tensor-model-parallel-size, with --sequence-parallel, the others have other experts, or shards of them, and tokens
    go to them by all-to-all. Default: --tensor-model-parallel-size."""
    hybrid_shard_degree: int = 0
    """Processes over which hybrid FSDP shards weights, gradients and optimizer state, times --context-parallel-size.
    0: all data-parallel ones; 1: none (replicas only); n: groups of n, replicated."""
    data_parallel_sharding_strategy: Literal["optim_grads_params", "optim_grads", "optim"] = "optim_grads_params"
    """What is sharded over data-parallel processes between the micro-batches of a step. Without params, weights are
    gathered once per step; without grads, too, gradients are reduced once per step: more memory, less communication. A
    pipeline does both, see --pipeline-reshard."""
    data_parallel_collectives: Literal["auto", "flat", "hierarchical"] = "flat"
    """How weights are gathered and gradients summed over data-parallel processes. flat: as gloo and NCCL do;
    hierarchical: once over each node's uplink, then inside of nodes (CPUs only, where a node has several of the
    processes); auto: by predicted time for each size, from links measured at the start. The choice is printed. Sums are
    taken in another order than flat ones."""
    network_topology: str | None = only_with(
        None, data_parallel_collectives=("auto", "hierarchical"), zero_hpz_partition_size=GIVEN
    )
    """JSON file that says which processes are on one node, what links carry, or both. Default: hostnames say it, and
    auto measures links."""
    zero_quantized_weights: bool = only_with(False, data_parallel_collectives="hierarchical")
    """Round what gathers of weights send to int8, in blocks of 128 numbers with a scale (ZeRO++). Every process then
    computes with rounded weights; the weights that are trained and saved are exact. The relative error is logged."""
    zero_quantized_gradients: bool = only_with(False, data_parallel_collectives="hierarchical")
    """Round what reductions of gradients send between nodes to int8, in blocks of 128 numbers with a scale, after
    the sum within each node (ZeRO++). Sums over replicas stay exact. The relative error is logged."""
    zero_hpz_partition_size: int = only_with(1, data_parallel_sharding_strategy="optim_grads_params")
    """Neighbours on one node, among the processes that shard weights, that keep what a forward pass has gathered once
    more, cut over them; the backward pass gathers within them (ZeRO++): less traffic between nodes, more memory. Has to
    divide --hybrid-shard-degree x --context-parallel-size. 1: none."""
    bf16: bool = False
    """Compute in bfloat16; master weights, gradient reduction and optimizer stay in fp32. Without it all is fp32, on
    CUDA with matrix products in TF32."""
    fp8_format: Literal["hybrid", "e4m3", "e2m1"] | None = None
    """Compute the linear layers of blocks in FP8. hybrid: inputs and weights in e4m3, gradients in e5m2, which has more
    range; e4m3: all of them; e2m1: 4 bits, of --fp8-recipe nvfp4. What stays as it is is printed. Default: no FP8."""
    fp8_recipe: Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"] = only_with(
        "delayed", fp8_format=GIVEN
    )
    """Which numbers share a scale, a power of two. delayed: a tensor, by its maxima in past steps; tensorwise: a
    tensor of a micro-batch; rowwise: a token or a row of a weight, weight gradients are not in FP8; blockwise: 128
    numbers of a token, 128 x 128 of a weight; mxfp8: 32 numbers along the dimension that a product sums; nvfp4: 16
    numbers of a token, 16 x 16 of a weight, a scale in e4m3, weight gradients are not in it. All but tensorwise and
    nvfp4 do not depend on micro-batches."""
    fp8_amax_history_len: int = only_with(1024, fp8_recipe="delayed")
    """Delayed scaling: steps whose maxima count."""
    fp8_amax_compute_algo: Literal["max", "most_recent"] = only_with("max", fp8_recipe="delayed")
    """Delayed scaling: the scale is that of the largest maximum of these steps, or of the last step's."""
    fp8_emulate: bool = only_with(False, fp8_format=GIVEN)
    """Compute the same 8-bit numbers without tensor cores, on any device: products of what was rounded, in fp32. For
    tests and to try what FP8 does to a loss; it is slower than no FP8."""
    fp8_param_gather: bool = only_with(False, fp8_recipe=("delayed", "tensorwise"))
    """FP8: gather weights that are sharded over data-parallel processes as 8-bit numbers, 1 byte each. The result is
    the same, bit for bit."""
    first_last_layers_bf16: bool = only_with(False, fp8_format=GIVEN)
    """FP8: leave the first and the last layers as they are without it."""
    num_layers_at_start_in_bf16: int = only_with(1, first_last_layers_bf16=True)
    """FP8: how many first layers."""
    num_layers_at_end_in_bf16: int = only_with(1, first_last_layers_bf16=True)
    """FP8: how many last layers."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in the backward pass. selective keeps matrix products, attention and communication
    results; full keeps only each block's input."""
    offload_activations: bool = False
    """Keep in the host's memory what blocks save for their backward pass: with --recompute-granularity full their
    inputs, with none all that their operations save. Copies run beside the computation and change no result."""
    activation_loading_horizon: int = only_with(2, offload_activations=True)
    """Blocks that have such activations on the device at most, at any moment. Those of the next backward passes come
    back ahead; with 1 each waits for its copy."""
    min_offloaded_tensor_size: int = only_with(1048576, offload_activations=True)
    """Elements from which on a saved tensor leaves the device, with --recompute-granularity none."""
    compile: bool = False
    """Compile each block with torch.compile."""
    kernels: Literal["auto", "torch", "triton", "cuda", "apex"] = "auto"
    """Implementation of cross-entropy, norms, SwiGLU and RoPE. auto: Triton on CUDA, where --compile does not fuse
    them, and PyTorch elsewhere. triton, cuda and apex: that one where it has the operation, else as auto. The choice is
    printed."""
    attention_backend: Literal["auto", "flash", "cudnn", "efficient", "math"] = "auto"
    """Backend of PyTorch's scaled dot-product attention. auto: the first that takes the model's attention, in an order
    that depends on the device. The choice is printed."""
    distributed_timeout_minutes: float = 10.0
    """A collective that waits longer ends the run; each waiting rank dumps its stack first."""
