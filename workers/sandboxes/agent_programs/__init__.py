"""Programs that an agent brings into its sandbox: npm packages, folders, archives, images."""
