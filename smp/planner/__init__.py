"""Which layout to train with: memory and step time of all of them, predicted and ranked (``tools/plan.py``).

Read :mod:`smp.planner.search` first: it goes through the layouts. Memory is :mod:`smp.training.cost.memory`'s.
"""
