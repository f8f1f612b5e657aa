"""Hugging Face models made parallel behind their own interface: ``smp.init`` and ``smp.transform``."""
