"""Rollouts that have ended as files of other programs: JSON lines, Parquet, folders of HF datasets."""
