"""The data source `harbor`: task folders of Harbor and terminal-bench, played and scored by Harbor's own rules."""
