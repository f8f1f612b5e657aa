"""Linear recurrences over tokens, in chunks and step by step, and the short convolution in front of them.
Read ``delta_rule`` first: its formulas, and the version that computes them one token after the other."""
