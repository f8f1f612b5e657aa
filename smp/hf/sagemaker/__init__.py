"""The names that scripts for SageMaker SMP v2 import, on this project: ``smp.compat.install()`` (``compat``), its
functions for checkpoints (``checkpoint``, ``checkpoint_queue``) and FSDP1 around a transformed model (``fsdp1``)."""
