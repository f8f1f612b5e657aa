"""Samples for fine-tuning: read, recognised, rendered, tokenized and packed. No torch except in the batches.

The way of a sample: a line of a file (``files``) is recognised as one of the known shapes (``shapes``), becomes text
with spans that are trained (``chat_template``) and token ids with a flag each (``encode``); all samples of a run lie
one after the other in arrays (``samples``), are laid into sequences (``sequences``), and batches are read from those.
"""
