"""Files that survive crashes and concurrent processes, and checks of what is read. Needs no other part."""
