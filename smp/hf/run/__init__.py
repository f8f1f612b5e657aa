"""A transformers model in a run of ``pretrain_gpt.py`` or ``finetune.py``: ``--model-implementation transformers``.

Read :mod:`smp.hf.run.model` first: it makes the module a :class:`smp.models.protocol.Model`. ``head`` gives a loss in
chunks, ``lora`` the adapters, ``documents`` says whether packing is exact, ``export`` writes the folder.
"""
