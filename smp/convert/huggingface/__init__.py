"""Hugging Face folders: ``config.json`` and tensors, read and written by tables.

Read :mod:`smp.convert.huggingface.families` first: a family is a table that is read in both directions, in the words of
``family``; ``more_families`` has the rest, ``qwen3_next``, ``hybrids`` and ``state_space`` those with recurrences.
``config`` turns ``config.json`` into settings and back (``reader``, ``experts``, ``own``: its keys), ``folder`` opens
and writes tensors (``store``: files; ``fp8_blocks``, ``mxfp4``: quantized ones).
"""
