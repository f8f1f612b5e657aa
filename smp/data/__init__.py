"""Text to tokens, tokens on disk, and batches that are a function of (seed, contents, sample number) alone.

Read ``sample`` first (what a row of a batch is made of), then ``gpt_dataset`` and ``loader``. :mod:`smp.data.files`
reads text, :mod:`smp.data.tokenizers` makes ids, ``preprocess`` and ``indexed_dataset`` put them on disk,
:mod:`smp.data.tuning` has the samples of fine-tuning. Importing this package, or its tokenizer and indexed dataset,
does not import torch: preprocessing starts fast.
"""
