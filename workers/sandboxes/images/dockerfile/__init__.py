"""Dockerfiles: parsed, planned as layers named by content, and built without a container engine."""
