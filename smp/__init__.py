"""smp: an open training stack for Llama/GPT-family language models."""

__version__ = "0.1.0"
