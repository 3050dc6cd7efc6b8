"""Tools for a GPU's dispatches: self-test, doctor, traces, cost model."""
