"""VeRL-Tool's tool server: actions of trajectories that a trainer runs itself, each trajectory in a borrowed sandbox.

Source of the message formats: TIGER-AI-Lab/verl-tool, verl_tool/servers and
verl_tool/agent_loop/verltool_agent_loop.py.
"""
