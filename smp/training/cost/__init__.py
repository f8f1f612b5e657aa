"""What a run would cost: memory by formula, and a step on tensors without data (``--dry-run``).

Read :mod:`smp.training.cost.memory` first: it sums what ``weight_memory``, ``kept_memory`` and ``step_moments`` count,
without torch, so that planners ask it thousands of times. :mod:`~smp.training.cost.fake_step` runs a real step of one
rank on fake tensors under the counters of ``meter``; ``predict`` chooses which of the two answers, ``describe`` prints
it, ``suggest`` the flags that make a run fit.
"""
