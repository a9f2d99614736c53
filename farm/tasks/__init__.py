"""Tasks in the folder forms that users have: read, checked against what the farm can give, and made into instances."""
