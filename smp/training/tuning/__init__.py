"""Fine-tuning: its settings and data, the loaded model, adapters, preference pairs, rollouts.

Read :mod:`smp.training.tuning.finetuning` first: the kind of run of ``finetune.py``. ``reinforcement`` and
``distilling`` are kinds of their own on top of it, ``saving_logits`` writes a teacher's pass to disk, ``model`` puts
adapters on and loads, ``settings`` runs before torch is imported. The losses are in :mod:`smp.training.objectives`.
"""
