"""The sources of the custom kernels for GPUs: files of C++, and what reads them."""
