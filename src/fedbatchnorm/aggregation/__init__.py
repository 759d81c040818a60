"""What a server does with its clients' messages; needs torch alone."""
