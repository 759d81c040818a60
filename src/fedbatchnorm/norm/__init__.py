"""What a layer keeps and a client measures; needs torch alone."""
