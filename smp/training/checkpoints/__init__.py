"""A run and its checkpoint folder: what is saved, when, and how a run continues from it.

Read :mod:`smp.training.checkpoints.saving` first: the folder, locked for one run. ``persistence`` and ``saved_run`` are
what a checkpoint holds besides weights, ``origin`` where a restarted command continues, ``hf_export`` the folder at a
run's end, ``foreign_weights`` the weights of a transformers model. The files themselves are written by
:mod:`smp.checkpoint`.
"""
