"""Servers that tests start, and their clients."""
