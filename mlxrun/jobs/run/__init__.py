"""A job while it runs."""
