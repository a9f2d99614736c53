"""The web page over HTTP."""
