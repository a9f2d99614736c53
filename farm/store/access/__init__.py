"""Keys, their quotas, and the audit log of what was ordered with them."""
