"""The conformance suite as a Flower app."""
