"""The rollout server of Polar, generation 2 of ProRL Agent: a task is a group of sessions, polled until it has ended.

Source of the message formats: NVIDIA-NeMo/ProRL-Agent-Server, src/polar/rollout and src/polar/trajectory.
"""
