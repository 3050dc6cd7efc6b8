"""Commands of ``metal-prefill``, one module each."""
