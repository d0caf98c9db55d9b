"""What every Python process of the tests does first: this folder is on its PYTHONPATH."""
