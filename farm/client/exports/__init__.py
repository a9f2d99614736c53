"""Export of ended rollouts to other formats: JSON lines, Parquet, folders of HF datasets."""
