"""Keys and the audit log of a farm: on its store, or over HTTP."""
