"""Distillation: a teacher next to the model that is trained, or what was kept of one, and completions of the model.

Begin with ``teacher``: what the objective asks of one; ``elsewhere``: one in its own layout. ``stored`` reads and
writes what a teacher said, ``unfinished`` knows how far that came, ``writing`` makes batches of completions that the
model writes. The loss itself is ``smp.layers.heads.distillation``.
"""
