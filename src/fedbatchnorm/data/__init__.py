"""Arrays and indices: datasets, and how they are split among clients. Needs torch and numpy alone."""
