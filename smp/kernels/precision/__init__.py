"""Numbers in 8 and 4 bits: FP8 products, NVFP4, NF4 weights of QLoRA, and stochastic rounding.
Read ``fp8`` first."""
