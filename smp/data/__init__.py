"""Text to tokens, tokens on disk, and batches that are a function of (seed, contents, sample number) alone.

Importing this package, or its tokenizer and indexed dataset, does not import torch: preprocessing starts fast.
"""
