"""A plain Flower app, as quickstarts are: docs/flower.md says what to change in it."""
