"""Errors of training."""


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why in one line."""
