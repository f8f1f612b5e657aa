"""Megatron-LM's command lines: its flags as a table, and a line of it in this project's flags."""
