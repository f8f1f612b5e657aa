"""Saving while training goes on: ``async_saver`` copies the state into shared memory (``staging``), a process next to
the trainer (``writer``; ``writer_process`` is the trainer's end of it) writes it."""
