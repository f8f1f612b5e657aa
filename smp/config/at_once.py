"""Sizes of chunks in which layers work where the whole would take too much memory. Kept here, without torch, because
formulas of memory read them as well."""

CAPPED_LOGITS = 1 << 22
"""Elements at once of logits that are capped: 16 MiB in fp32."""
DROPOUT_BITS = 1 << 22
"""Elements at once of a dropout mask whose bits are made, which take 8 bytes each, several times."""
