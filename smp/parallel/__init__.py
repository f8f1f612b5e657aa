"""Mesh, collectives, layout-independent random numbers and agreements between ranks."""
