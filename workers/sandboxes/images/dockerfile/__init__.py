"""Dockerfiles: parsed, planned as layers that are named by content, and built without a container engine."""
