"""Recompute, offload, compile and hybrid FSDP."""

from smp.sharding.offload import offload_activations

__all__ = ["offload_activations"]
