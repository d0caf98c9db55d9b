"""What a job writes."""
