"""Reports of runs: one HTML file that contains all it needs, or Markdown."""
