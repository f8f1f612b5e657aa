"""Texts without training: a model with its tokenizer in one process, to generate with (``text_model``) or to
evaluate."""
