"""The outbox of webhooks: messages to others, kept until they are accepted."""
