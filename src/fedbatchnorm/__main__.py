"""`python -m fedbatchnorm` is the command `fedbatchnorm`."""

from .cli import main

main()
