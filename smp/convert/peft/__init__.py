"""Adapters in peft's format: ``read``, ``write``, those of experts, and (``adapters``) merged into a model."""
