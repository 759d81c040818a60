"""Federated training on one device, with a whole round in one pass. Needs torch and numpy only."""
