"""Turns request bodies of the APIs into Requests, and answers into responses and streams.

`openai`, `responses` and `anthropic` each have `fields` (the schema), and `request`, which reads bodies.
`responses` and `anthropic` translate to bodies of `openai`, and do not import each other. In this folder only
`stored_files` imports more than one of them.
"""
