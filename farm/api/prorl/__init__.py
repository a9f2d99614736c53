"""The HTTP API of the ProRL Agent server, generation 1: one synchronous `/process` for each trajectory.

Source of the forms: NVIDIA-NeMo/ProRL-Agent-Server, scripts/start_server.py and openhands/nvidia/. What its clients
rely on is kept; what is a fault of that server is not, unless the API runs with `--strict-compat`.
"""
