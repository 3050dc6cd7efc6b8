"""Tools for GPU dispatches: kernel checks, self-test and ways to decode."""
