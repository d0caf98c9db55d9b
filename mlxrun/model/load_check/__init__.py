"""The load check: results of the fast compute methods, compared with the library's own calls at load."""
