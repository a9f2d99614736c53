"""The data source `harbor`: task folders of Harbor and terminal-bench, run and scored by Harbor's own rules."""
