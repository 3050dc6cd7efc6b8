"""Translates Metal Shading Language to C++ for a CPU or NVPTX, or to C++ for OpenCL to check it."""
