"""Saving while training continues: ``async_saver`` copies the state into shared memory (``staging``), a process next to
the trainer (``writer``; ``writer_process`` is the trainer's end of it) writes it."""
