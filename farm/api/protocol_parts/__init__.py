"""Parts that protocols of other systems have in common."""
