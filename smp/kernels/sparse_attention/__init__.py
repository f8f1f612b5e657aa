"""DeepSeek's sparse attention (DSA; DeepSeek-V3.2, arXiv 2512.02556, 2.1): which keys each query sees, attention to
these alone, and the loss that teaches the choice. Read ``indexer`` first."""
