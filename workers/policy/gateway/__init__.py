"""Serves the model APIs that unmodified agents use to one rollout, and records every call as the policy's.

An agent inside the sandbox is given a plain base URL; a relay in the sandbox leads to a Unix socket of the rollout, on
which this gateway listens within the worker's event loop. Each request is translated to chat messages, answered by
`Policy.complete`, recorded as a model call, and translated back. The gateway tokenises nothing: the policy decides
which held ids a conversation continues.
"""
