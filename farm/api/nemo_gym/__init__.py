"""NeMo Gym's agent server: `/run` plays a row and scores it, `/aggregate_metrics` sums up what it answered.

Source of the forms: the package nemo-gym 0.7, of NVIDIA-NeMo/Gym: `base_responses_api_agent`, `base_resources_server`,
`openai_utils`, `rollout_collection`.
"""
