"""Pipeline parallelism: a schedule is a list of actions for each rank, checked, simulated and run.

Read :mod:`smp.pipeline.stage_plan` first: from settings to a checked schedule. :mod:`smp.pipeline.schedules` makes them
(a new one is a new function there), ``validate_schedule`` proves one complete and free of deadlocks, ``run`` runs any.
"""
