"""Evals: suites of jobs, run folders, comparing, verifying, reports and exports."""
