"""The engines and servers that benchmarks compare, one module each."""
