"""SGLang's wire format, as published for 0.5.23: /generate, chat, and the control routes."""
