"""The conversation of `mlxrun chat`: its server, its messages, what is typed and what is shown."""
