"""Reads the host's certificates once for every client that is made: most of what an `OpenAI()` costs."""

import ssl

CONTEXT = ssl.create_default_context()
