"""The promises of every sandbox as named coroutines that check any provider on any machine.

`python -m workers.conformance NAME` (or `farm doctor --sandbox NAME`) tries them all on one kind of sandbox. They use
only `workers/plugins/interfaces.py`, `/proc` and the node's files, so they apply to plug-ins and to built-in kinds.
"""
