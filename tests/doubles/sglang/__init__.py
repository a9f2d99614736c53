"""SGLang's wire, as its 0.5.23 is published: /generate, chat, and the control routes."""
