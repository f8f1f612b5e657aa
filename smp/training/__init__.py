"""The training run: set-up, optimizer step, logging, evaluation, checkpoints and exit.

Read ``run`` first (the loop), then ``trainer`` (one optimizer step on one screen). What is minimised is in
:mod:`smp.training.objectives`; fine-tuning in :mod:`~smp.training.tuning`, sampling in :mod:`~smp.training.rollouts`,
the checkpoint folder in :mod:`~smp.training.checkpoints`, log and sinks in :mod:`~smp.training.reporting`, failures in
:mod:`~smp.training.faults`, memory and dry run in :mod:`~smp.training.cost`.

Arguments that many functions here have, and that their docstrings leave out: ``config``, resolved settings;
``process``, rank and world size of this process; ``setup``, where and how the run computes (``RunSetup``): ``context``
has the meshes and groups, ``device`` is that of the model; ``model``, after ``parallelize``, its weights initialized;
``forward_backward``, runs its micro-batches; ``optimizer``, over its parameters; ``progress``, the counters; ``stop``,
told of signals; ``say``, which tells the user one line, and on ranks other than 0 does nothing.
"""
