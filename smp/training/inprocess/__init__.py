"""Recovery inside the process (--inprocess-restart): when one process is lost, the others continue without a restart.

The launcher starts a ``keeper`` for each rank. The keeper starts the process that trains (the worker, at the other end
of a ``link``) and a standby, which has imported everything and replaces a lost worker. The other workers close their
connections to the lost attempt (``connections``), join the next one at a store (``meeting``), and continue from the
copies in memory. Read ``again`` first: the loop around a run. ``keeper`` and ``link`` import no torch.
"""
