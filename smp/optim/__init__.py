"""Optimizers on sharded parameters, the learning-rate schedule, and clipping.

Read :mod:`smp.optim.optimizer` first: parameter groups, the clip of the whole gradient, the step.
"""
