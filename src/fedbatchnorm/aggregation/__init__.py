"""What a server does with its clients' messages. Needs torch only."""
