"""Datasets, and how they are split among clients. Needs torch and numpy only."""
