"""What a layer stores and what a client measures. Needs torch only."""
