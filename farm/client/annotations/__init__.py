"""Figures of trainers about rollouts: written, and read again."""
