"""The API gateway of Agent Lightning 1: rollouts by id, their events, model servers, and the pause of these.

Source of the forms: the package agentlightning 1.0.2, of microsoft/agent-lightning: `schemas`, `server/routes`.
"""
