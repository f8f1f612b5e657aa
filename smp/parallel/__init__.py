"""Mesh, collectives and layout-independent random numbers."""
