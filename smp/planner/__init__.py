"""Which layout to train with: predicts memory and step time of all of them, and ranks them (``tools/plan.py``).

Read :mod:`smp.planner.search` first: it goes through the layouts. Memory is :mod:`smp.training.cost.memory`'s.
"""
