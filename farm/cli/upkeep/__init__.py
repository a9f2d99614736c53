"""The command that shows the settings of a farm, and where each stands."""
