"""Output of a run: log lines, metric sinks, profiles, the record of its starts, goodput, slow ranks.

Read :mod:`smp.training.reporting.console` first: it makes each record, ``sinks`` write it to files and services.
``own_time`` measures a rank's computation without its waiting, ``stragglers`` decides who is slow, ``slow_ranks``
brings the times together and names them.
"""
