"""What agents send: a generator of request bodies per agent, built from the answers so far as the agent
builds them.

The shapes (fields, headers, roles, forms of content and of tools, what is sent back of an answer) follow the
agents' public sources and documentation; the texts are our own, in proportion to theirs.
"""
