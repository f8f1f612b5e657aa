"""The names that scripts for SageMaker SMP v2 import: ``smp.compat.install()`` (``compat``), its checkpoint functions
(``checkpoint``, ``checkpoint_queue``) and FSDP1 around a transformed model (``fsdp1``)."""
