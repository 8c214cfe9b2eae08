"""`python -m broker` is `broker`."""

from broker.cli.main import main

main()
