"""The documentation site: what MkDocs adds to the pages of docs/ when `make docs` builds it."""
