"""Shared helpers: checked arguments, atomic writes, cached attributes, lazy imports."""
