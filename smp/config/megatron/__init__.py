"""Megatron-LM's command lines. Read ``translate`` first: a line in this project's flags, by ``table``, whose rows are
in the files by subject."""
