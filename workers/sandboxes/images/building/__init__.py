"""Builds of images by the container runtime, whose processes can write nothing outside of the place of their build."""
