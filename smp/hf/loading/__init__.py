"""Weights of a transformed model: delayed initialization, and folders read and written.

Read :mod:`smp.hf.loading.delayed` first: parameters on the meta device get values part by part, drawn
(``first_values``) or read (``weights``, with the names that ``stored_names`` maps). ``twins`` are copies of a model
without weights.
"""
