"""What every floor uses: errors, requests, what a step computes, and texts that people are shown."""
