"""What every sandbox promises, as named coroutines that any provider can be tried with, on any machine.

`python -m workers.testing.promises NAME` (or `farm doctor --sandbox NAME`) tries them all on one kind of sandbox. They
use `workers/interfaces.py`, `/proc` and the node's files alone, so that they hold for plug-ins as for our own kinds.
"""
