"""Shared helpers: argument checks, choices, atomic writes, cached attributes and lazy imports."""
