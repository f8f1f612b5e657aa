"""Mixers with a linear recurrence: a gated delta net, Kimi delta attention, Mamba-2, and what they share."""
