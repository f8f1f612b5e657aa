"""From hidden states to a loss: the vocabulary-parallel head and cross-entropy, losses over answers, distillation, a
reward model's score, multi-token prediction.

Read :mod:`smp.layers.heads.head` first.
"""
