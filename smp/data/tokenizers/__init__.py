"""Tokenizers: ``tokenizer`` is the interface and sentencepiece, ``files`` reads tokenizer.json and tiktoken's merges,
``gigatoken_backend`` is a faster library for the same ids."""
