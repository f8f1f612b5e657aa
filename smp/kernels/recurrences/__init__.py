"""Linear recurrences over tokens, in chunks and step by step, and the short convolution in front of them."""
