"""Any agent, unmodified, recorded: the model APIs that agents use, served to one rollout and answered by its policy.

An agent inside the sandbox is given a plain base URL; a relay beside it leads to a Unix socket of the rollout's own,
on which this gateway listens within the worker's event loop. Each request is translated to chat messages, answered by
`Policy.complete`, recorded as a model call, and translated back. The gateway tokenises nothing: which held ids a
conversation continues is decided by the policy.
"""
