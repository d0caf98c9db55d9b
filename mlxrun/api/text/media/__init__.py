"""Images, PDFs, videos and audio in the messages of requests."""
