"""The model APIs of the vendors: each turns its requests into chat messages, and completions into its answers."""
