"""The load check: what the fast compute methods give, compared with the library's own calls at load."""
