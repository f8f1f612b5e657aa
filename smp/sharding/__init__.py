"""Recompute, offload, compile and hybrid FSDP.

Read :mod:`smp.sharding.parallelize` first: it applies them, in that order. ``stages`` lets a pipeline's schedule gather
and reduce, ``tied`` adds up a matrix that both ends of a pipeline have, ``network`` and ``fp8_gather`` change how
FSDP's collectives run.
"""

from smp.sharding.offload import offload_activations

__all__ = ["offload_activations"]
