"""The API gateway of Agent Lightning 1: rollouts by id, their events, model servers, and the pause of these servers.

Source of the message formats: the package agentlightning 1.0.2, of microsoft/agent-lightning: `schemas`,
`server/routes`.
"""
