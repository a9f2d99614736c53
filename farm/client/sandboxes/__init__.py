"""The client's side of borrowed sandboxes: verbs, on a store or over HTTP, and the line to the node that has one."""
