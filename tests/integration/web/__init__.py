"""The page over HTTP."""
