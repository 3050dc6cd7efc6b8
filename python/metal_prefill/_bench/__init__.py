"""How `metal_prefill.bench` measures."""
