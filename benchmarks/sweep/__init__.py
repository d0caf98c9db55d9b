"""`python -m benchmarks sweep`: every family of the libraries, compared with the library's own loop."""
