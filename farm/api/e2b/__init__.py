"""E2B's wire protocol on borrowed sandboxes: its REST API for sandboxes, and in each the service of its agent, envd.

A sandbox is borrowed from the farm, and a template is an image. Requests for the agent name their sandbox in a header
and use the Connect protocol with JSON.
"""
