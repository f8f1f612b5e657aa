"""Checks of settings, one file per feature. Imports no torch.

Read :mod:`smp.config.rules.checks` first: it holds single values to their ranges and then asks the others, each of
which knows one feature (experts, FP8, context parallelism, ...) and says what that needs of the other settings. An
error is one line that names the flag.
"""
