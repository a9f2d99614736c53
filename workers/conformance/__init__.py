"""The promises of every sandbox, as named coroutines that check any provider, on any machine.

`python -m workers.conformance NAME` (or `farm doctor --sandbox NAME`) tries them all on one kind of sandbox. They
use `workers/interfaces.py`, `/proc` and the node's files alone, so that they hold for plug-ins as for built-in kinds.
"""
