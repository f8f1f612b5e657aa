"""Checkpoints of other programs: Hugging Face folders and Megatron's, as mapping tables, read and written in streams.

The way of a tensor: a *store* knows the tensors of some files under their own names; a *table* says which of their rows
are which of this project's; *weights* put the two together and answer for any region of any tensor. Loading a sharded
model and writing a checkpoint of any format ask weights. ``smp_name`` and ``external_name`` are a tensor's two names.

Read ``convert`` first (one checkpoint into another), then ``weights``. :mod:`smp.convert.huggingface` and
:mod:`smp.convert.megatron` have the tables, :mod:`smp.convert.peft` adapters, ``load`` fills a sharded model.

What belongs to configurations imports no torch, so that a command line is checked before torch is there.
"""
