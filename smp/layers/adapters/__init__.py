"""Adapters on frozen linear layers: ``lora`` (read it first), ``dora``, and 4-bit weights under them (``quantized``:
QLoRA)."""
