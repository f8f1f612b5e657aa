"""Adapters on frozen linear layers: LoRA, DoRA, and 4-bit weights under them (QLoRA)."""
