"""Turns Metal Shading Language into C++ for a CPU or for NVPTX, or into C++ for OpenCL to check it."""
