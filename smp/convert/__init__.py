"""Checkpoints of other programs: Hugging Face folders and Megatron's, as mapping tables, read and written in streams.

The way of a tensor: a *store* knows the tensors of some files under their own names; a *table* says which of their rows
are which of ours; *weights* put the two together and answer for any box of any of our tensors. Loading a sharded
model, writing our checkpoints and writing theirs all ask weights.

What belongs to configurations imports no torch, so that a command line is checked before torch is there.
"""
