"""Builds of images by the container runtime, whose processes can write only to the work folder of their build."""
