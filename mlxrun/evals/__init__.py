"""Evals: suites of jobs, run folders, comparisons, verification, reports and exports."""
