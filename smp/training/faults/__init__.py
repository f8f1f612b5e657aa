"""What a run does when something is wrong: numbers, ranks, nodes.

Read :mod:`smp.training.faults.guard` first: after each step it asks ``replicas`` (do copies agree?), ``nonfinite``
(where does a NaN come from?) and ``snapshot`` with ``spikes`` (go back?). ``rerun`` computes a doubted step again,
``copies`` and ``members`` serve runs that lose or gain nodes, ``hang`` names the ranks that block the others,
``silence`` kills processes that have stopped.
"""
