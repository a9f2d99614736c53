"""The HTTP API of the ProRL Agent server, generation 1: one synchronous `/process` for each trajectory.

Source of the message formats: NVIDIA-NeMo/ProRL-Agent-Server, scripts/start_server.py and openhands/nvidia/. Behaviour
that its clients rely on is kept; bugs of that server are not, unless the API runs with `--strict-compat`.
"""
