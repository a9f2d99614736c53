"""The model APIs of the vendors: each translates its requests to chat messages, and completions to its answers."""
