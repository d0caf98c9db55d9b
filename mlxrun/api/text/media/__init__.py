"""Images, PDFs and videos in the messages of requests."""
