"""The outbox of webhooks: what is to be sent to others, kept until they took it."""
