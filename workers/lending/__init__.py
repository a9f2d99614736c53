"""Sandboxes that clients borrow, on their node: started by its run worker, which answers their calls itself.

The way of a call: client → any process of the API → this worker, by HTTP at the address and with the token in the
sandbox's row. So no message of the broker and no task is on it, and the id alone finds the sandbox from any process.

The way of a start: the row is written, the dispatcher gives it a slot of a node, as it gives one to a rollout, and the
worker, which asks the store for rows of its node, starts the sandbox and writes its address. A worker that takes the
place of another attaches to what runs and writes its own address; shells and Pythons begin anew then.

The lease is in the row: whoever calls renews it, and the dispatcher ends what nobody called.
"""
