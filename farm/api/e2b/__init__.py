"""The wire of E2B on borrowed sandboxes: its REST API for sandboxes, and in each the service of its agent, envd.

A sandbox is borrowed from the farm, and a template is an image. Requests for the agent name their sandbox in a header;
its verbs are of the Connect protocol, with JSON.
"""
