"""Arrays, references and devices of tests of kernels."""
