"""Folders that checkpoints live in: ``folder`` is the interface, ``local`` a file system, ``remote`` an object store;
``lock`` keeps a folder to one job, ``latest`` names the newest checkpoint, ``retention`` decides which stay."""
