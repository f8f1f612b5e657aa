"""Mixers with a linear recurrence: a gated delta net, Mamba-2, and what they share."""
