"""The client side of borrowed sandboxes: verbs, on a store or over HTTP, and the connection to their nodes."""
