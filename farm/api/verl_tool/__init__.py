"""VeRL-Tool's tool server: actions of trajectories that a trainer plays itself, each in a borrowed sandbox by its id.

Source of the forms: TIGER-AI-Lab/verl-tool, verl_tool/servers and verl_tool/agent_loop/verltool_agent_loop.py.
"""
