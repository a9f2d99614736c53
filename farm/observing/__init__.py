"""Outputs for observers of a farm: logs, metrics, traces, webhooks, alarms."""
