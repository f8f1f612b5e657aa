"""Recovery inside the process (--inprocess-restart): where one process is lost, the others go on without a new start.

What the launcher starts is a ``keeper``: it starts the process that trains (the worker, at the other end of a ``link``)
and holds another one ready, which has imported all there is and takes the place of the first when that is lost. The
others ``meet`` it at a store of their start once they have let go of the lost run (``connections``), and begin the next
one from the copies in memory. Read ``again`` first: the loop around a run. ``keeper`` and ``link`` import no torch.
"""
