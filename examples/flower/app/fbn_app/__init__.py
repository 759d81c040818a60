"""Federated BatchNorm on Flower."""
