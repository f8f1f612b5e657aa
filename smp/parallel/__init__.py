"""Meshes, collectives, layout-independent random numbers and agreements between ranks.

Read :mod:`smp.parallel.context` first: one value with every mesh and process group of a run. ``collectives`` has what
layers call, each with its backward pass, ``links`` the messages of a pipeline, ``agree`` what all ranks must see alike,
``rng`` the keys of random numbers, ``region`` and ``dtensor_region`` the offsets and sizes of shards. ``node_group``,
``shared_memory``, ``mailboxes`` and ``shared_numbers`` serve ranks of one machine, :mod:`smp.parallel.network`
collectives that know the nodes.
"""
