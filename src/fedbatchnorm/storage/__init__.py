"""Files that survive crashes and other processes, and what is read from them checked. Stands alone."""
