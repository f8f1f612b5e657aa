"""What a run does when something is wrong: numbers, ranks, nodes.

Read :mod:`smp.training.faults.guard` first: after each step it asks ``replicas`` (do copies agree?), ``nonfinite``
(where does a NaN come from?) and ``snapshot`` with ``spikes`` (go back?). ``rerun`` computes a doubted step again,
``copies`` and ``members`` serve runs that lose nodes or gain some, ``hang`` says who has not come,
``silence`` ends who is stopped.
"""
