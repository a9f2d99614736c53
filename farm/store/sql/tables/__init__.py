"""Tables of what lies beside model calls."""
