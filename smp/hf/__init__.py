"""Hugging Face models made parallel behind their own interface: ``smp.init`` and ``smp.transform``.

Read :mod:`smp.hf.transform` first: from a plan (:mod:`smp.hf.planning`) to a tensor-parallel model (``modules``), with
``sequence``, ``context`` and ``experts`` for the other parallelisms and :mod:`smp.hf.loading` for weights. ``state`` is
``smp.state``. :mod:`smp.hf.run` brings such a model into a run, :mod:`smp.hf.sagemaker` has SMP v2's names.
"""
