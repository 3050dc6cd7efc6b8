"""Shared helpers: argument checks, atomic writes, cached attributes and lazy imports."""
