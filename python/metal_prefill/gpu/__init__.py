"""Tools for GPU dispatches: kernel checks, self-test, traces and cost model."""
