"""API keys, their quotas, and the audit log of orders."""
