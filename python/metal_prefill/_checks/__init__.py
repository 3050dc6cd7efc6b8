"""Checks of a device against the CPU engine: of single kernels, and at first contact."""
