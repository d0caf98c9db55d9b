"""A run or a suite as one file that travels, and how such a file is unpacked."""
