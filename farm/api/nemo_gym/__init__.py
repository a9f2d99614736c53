"""NeMo Gym's agent server: `/run` runs and scores a row, `/aggregate_metrics` aggregates its results.

Source of the message formats: the package nemo-gym 0.7, of NVIDIA-NeMo/Gym: `base_responses_api_agent`,
`base_resources_server`, `openai_utils`, `rollout_collection`.
"""
