"""Collectives that know the network: which ranks are on one node, and what links carry. See docs/collectives.md.

``topology``, ``schedule``, ``schedules``, ``validate``, ``simulate``, ``cost``, ``fabric`` and ``picture`` are pure and
import no torch; ``run`` executes a schedule, ``quantize`` rounds what crosses uplinks, ``group`` binds all of it to a
process group, ``measure`` and ``choose`` decide.
"""
