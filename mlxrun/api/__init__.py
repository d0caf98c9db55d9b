"""Turns request bodies of the APIs into Requests, and answers into responses and streams.

`openai`, `responses` and `anthropic` each have `fields` (the schema), `request`, `response` and `stream`. The
modules of this folder import none of the three; `responses` and `anthropic` translate to bodies of `openai`,
and import nothing else of each other.
"""
