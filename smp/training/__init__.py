"""The run, the step, what it reports and how it ends.

Arguments that many functions here have, and that their docstrings leave out: ``config``, resolved settings;
``process``, this one's place among the others; ``place``, where and how the run computes (``Workplace``), of which
``context`` are the meshes and groups and ``device`` that of the model; ``model``, after ``parallelize``, its weights
initialized; ``forward_backward``, how its micro-batches are run; ``optimizer``, over its parameters; ``progress``, the
counters; ``stop``, told of signals; ``say``, which tells the user one line, and on ranks other than 0 does nothing.
"""
