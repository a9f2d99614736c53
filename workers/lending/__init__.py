"""Sandboxes that clients borrow, on their node: started by its run worker, which answers calls itself.

The path of a call: client → any process of the API → this worker, by HTTP at the address and with the token in the
sandbox's row. No broker message and no task is involved, and any process finds the sandbox by its id.

The path of a start: the row is written, the dispatcher assigns a slot of a node, as for a rollout, and the worker,
which reads the rows of its node from the store, starts the sandbox and writes its address. A worker that replaces
another one attaches to the running sandboxes and writes its own address; shells and Pythons then start again.

The lease is in the row: each call renews it, and the dispatcher ends sandboxes whose lease has expired.
"""
