"""Rewards of what a model writes: user functions, built-in verifiers, and the processes that call them.

================  =============================================================
file              what
================  =============================================================
functions         finds functions, calls them, checks what they return
verifiers         built-in ones: exact match, numbers, math, JSON schema, patterns
child             a process that is asked over pipes, with lines of JSON
worker            one that calls functions
pool              several of them, their time limits and errors
environment       a process with episodes of several turns
environment_pool  several of them
================  =============================================================

Begin with ``pool``. Nothing here imports torch.
"""
