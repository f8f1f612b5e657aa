"""Where a job runs: this machine (``local``), ``slurm``, Kubernetes (``k8s``) and SageMaker (``sm_jobs``).

Read :mod:`smp.launch.backends.backend` first: what every back-end does. ``supervise`` is copied into a job's folder and
restarts the training command there; ``in_sagemaker`` starts a container of SageMaker.
"""
